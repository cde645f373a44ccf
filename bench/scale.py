"""what large models take: memory and processor time of each verb beside the plain pass.

Llama shapes with random weights in bfloat16, made here. Each verb runs in a process of its own. The terms of
the formula in docs/scale.md come from the smaller sizes; the largest shows how far off it is.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

import manyheads as mh
from bench.harness import MIB, say, table, targets
from bench.memory import status
from manyheads.models.checkpoint import write_tensors
from manyheads.surgery.small_twin import structure

ROOT = Path(os.environ.get("MANYHEADS_BENCH_MODELS", "out/scale"))
RECORD = Path(__file__).parent / "results" / "scale.json"
LENGTH, GRADIENT_LENGTH, GENERATED = 2048, 512, 8
SHAPES = {  # hidden size, heads, key heads, layers, feed-forward width
    "0.06B": (512, 8, 2, 8, 1408),
    "0.26B": (1024, 16, 4, 16, 2816),
    "1.1B": (2048, 32, 4, 22, 5632),
}
VERBS = ("plain", "inspect", "cut on disk", "load", "generate", "plain 512", "importance")


def make(shape: str) -> Path:
    """The folder of a model of this shape, in two files, drawn one tensor at a time."""
    folder = ROOT / shape
    if (folder / "config.json").is_file():
        return folder
    hidden, heads, key_heads, layers, inner = SHAPES[shape]
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=key_heads,
        num_hidden_layers=layers, intermediate_size=inner, vocab_size=32_000, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    state = structure(transformers.LlamaForCausalLM, config, torch.bfloat16).state_dict()
    generator = torch.Generator().manual_seed(1)

    def drawn(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            return torch.ones(x.shape, dtype=torch.bfloat16)
        return (
            torch.randn(x.shape, generator=generator, dtype=torch.float32).mul_(x.shape[1] ** -0.5).bfloat16()
        )

    names = list(state)
    files = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        (folder / file).unlink(missing_ok=True)
        layout = {name: (tuple(state[name].shape), torch.bfloat16) for name in part}
        write_tensors(folder / file, layout, ((name, [drawn(name, state[name])]) for name in part))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return folder


def removed(shape: str) -> dict[int, list[int]]:
    """Half of the key heads of every second layer, with the heads that read them."""
    _, heads, key_heads, layers, _ = SHAPES[shape]
    return {layer: list(range(heads // key_heads * (key_heads // 2))) for layer in range(0, layers, 2)}


def one(shape: str, verb: str) -> dict[str, float]:
    """Peak bytes and processor seconds of a verb, in this process; loading is not in the seconds."""
    folder, small = make(shape), ROOT / f"{shape}-small"
    ids = torch.randint(32_000, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    model = None
    if verb in ("plain", "inspect", "plain 512", "importance"):
        model = mh.open_model(str(folder), head=True, dtype="bfloat16").model
    else:
        _ = mh.cut_on_disk, transformers.LlamaForCausalLM  # imported: Python and its libraries do not count
    before, started = status("VmRSS"), time.process_time()
    if verb == "plain":
        with torch.no_grad():
            model(ids, logits_to_keep=1)
    elif verb == "plain 512":
        with torch.no_grad():
            model(ids[:, :GRADIENT_LENGTH], logits_to_keep=1)
    elif verb == "inspect":
        with torch.no_grad(), mh.watch(model, statistics="full") as seen:
            model(ids, logits_to_keep=1)
        assert len(seen.table["site"]) == SHAPES[shape][1] * SHAPES[shape][3]
    elif verb == "importance":
        batch = {"input_ids": ids[:, :GRADIENT_LENGTH]}
        mh.importance(model, [batch], method="fisher", unverified="allow")
    elif verb == "cut on disk":
        if small.exists():
            for path in small.iterdir():
                path.unlink()
        mh.cut_on_disk(folder, removed(shape), small)
    elif verb in ("load", "generate"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(small, dtype="auto")
        if verb == "generate":
            started = time.process_time()
            loaded.generate(ids[:, :32], max_new_tokens=GENERATED, do_sample=False)
    return {"before": before, "peak": status("VmHWM"), "seconds": time.process_time() - started}


def measured(shape: str, verb: str) -> dict[str, float]:
    """`one` in a process of its own, or what is on record."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    key = f"{shape} {verb}"
    if key not in record:
        say(f"running {key}")
        command = [sys.executable, "-m", "bench.scale", shape, verb]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        if done.returncode:
            raise RuntimeError(f"{key} ended with {done.returncode}: {done.stderr[-2000:]}")
        record[key] = json.loads(done.stdout.splitlines()[-1])
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return record[key]


def weights(shape: str) -> int:
    """The number of weights of a shape."""
    hidden, heads, key_heads, layers, inner = SHAPES[shape]
    attention = 2 * hidden * hidden * (1 + key_heads / heads)
    return int(layers * (attention + 3 * hidden * inner + 2 * hidden) + 2 * 32_000 * hidden + hidden)


def run(quick: bool) -> str:
    shapes = list(SHAPES)[:1] if quick else list(SHAPES)
    results = {shape: {verb: measured(shape, verb) for verb in VERBS} for shape in shapes}
    rows, predictions = [], []
    for shape, of_shape in results.items():
        for verb, numbers in of_shape.items():
            plain = of_shape["plain 512" if verb == "importance" else "plain"]
            times = numbers["seconds"] / plain["seconds"]
            heavier = numbers["peak"] / plain["peak"]
            rows.append(
                [
                    f"{shape} {verb}",
                    f"{numbers['peak'] / MIB:.0f}",
                    f"{heavier:.2f}x",
                    f"{numbers['seconds']:.1f}",
                    f"{times:.2f}x" if verb in ("inspect", "importance") else "",
                ]
            )
    largest = shapes[-1]
    for verb in VERBS:
        if len(shapes) == 3:
            few = [(weights(s), results[s][verb]["peak"]) for s in shapes[:2]]
            slope = (few[1][1] - few[0][1]) / (few[1][0] - few[0][0])
            guess = few[1][1] + slope * (weights(largest) - few[1][0])
            actual = results[largest][verb]["peak"]
            rate = results[shapes[1]][verb]["seconds"] / weights(shapes[1]) * weights(largest)
            spent = results[largest][verb]["seconds"]
            predictions.append(
                [
                    verb,
                    f"{slope:.2f}",
                    f"{guess / MIB:.0f}",
                    f"{actual / MIB:.0f}",
                    f"{guess / actual - 1:+.0%}",
                    f"{rate:.0f}",
                    f"{spent:.0f}",
                    f"{rate / spent - 1:+.0%}",
                ]
            )
    parts = [
        f"{LENGTH} tokens; importance, by fisher, and its plain pass {GRADIENT_LENGTH}. Cut on disk removes "
        f"half of the key heads of every second layer. Generate writes {GENERATED} tokens. Two programs "
        "beside kept both cores busy.",
        table(["", "peak, MiB", "of plain", "processor seconds", "of plain"], rows),
    ]
    if predictions:
        header = ["largest, from the smaller two", "bytes per weight", "MiB predicted", "measured", "off by"]
        parts.append(table([*header, "seconds predicted", "measured", "off by"], predictions))
    top = results[largest]
    tensor, cut = 32_000 * SHAPES[largest][0] * 2, top["cut on disk"]
    parts.append(
        targets(
            ("watch, peak of plain", top["inspect"]["peak"] / top["plain"]["peak"], "<=", 1.1),
            ("importance, peak of plain", top["importance"]["peak"] / top["plain 512"]["peak"], "<=", 1.5),
            ("cut on disk, largest tensors", (cut["peak"] - cut["before"]) / tensor, "<=", 1),
        )
    )
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(json.dumps(one(*sys.argv[1:])))
