"""what it costs to watch every head of a model while it runs.

The model watched, with the core and the full set, against its plain forward pass, and against those who hold
all maps in memory: transformers in eager mode with output_attentions, TransformerLens with run_with_cache.
What was measured is kept in results/watch.json, and not measured again: delete the file to begin anew.
"""

import gc
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from bench.harness import GIB, MIB, milliseconds, table, targets
from bench.memory import peak
from bench.record import Record
from bench.statistics import in_turns
from manyheads.heads.watch import watch

RECORD = Path(__file__).parent / "results" / "watch.json"
TOKENS = 4096  # in a batch, as many as `manyheads inspect` takes, or one sequence
# Model: lengths timed; "padded" has sequences of 10% to 100% of the length.
TIMED: dict[str, tuple[int, ...]] = {
    "MiniLM": (128, 512),
    "MiniLM, padded": (512,),
    "BERT-base": (128, 512),
    "SmolLM2": (128, 512, 2048, 8192),
    "SmolLM2, padded": (512,),
    "decoder": (512, 2048, 4096, 8192),
}
WEIGHED = {"MiniLM": (512,), "BERT-base": (512,), "SmolLM2": (2048, 8192), "decoder": (4096, 8192)}
LONGEST = 32768
WATCHED = ("core", "full")
# Who holds every map. At the lengths where the machine can, of the models where it matters.
HOLDERS = {
    "eager": {
        "MiniLM": (128, 512),
        "BERT-base": (128, 512),
        "SmolLM2": (128, 512),
        "decoder": (512, 2048, 4096),
    },
    "TransformerLens": {"decoder": (512, 2048)},
    "TransformerLens, patterns": {"decoder": (512, 2048)},
}
SHORT, LONG = {"core": 1.4, "full": 2.4}, {"core": 1.7, "full": 2.7}  # to 512, and at 8192
MEMORY, FASTER, SMALLER = 1.25, 1.5, 8.0


_ids: dict[str, list[int]] = {}  # the tokens of our text, by the model's own tokenizer


def body(name: str, attention: str = "sdpa") -> Any:
    """A model without its vocabulary head, whose cost would only make watching look cheaper."""
    import transformers as hf

    from bench.models import minilm, smollm2

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    torch.manual_seed(0)
    if name == "BERT-base":
        return hf.BertModel(hf.BertConfig(attn_implementation=attention)).eval()
    if name == "decoder":
        return hf.LlamaModel(decoder(attention)).eval()
    model, tokenizer = minilm() if name == "MiniLM" else smollm2()
    text = (resources.files("manyheads") / "data" / "files" / "text.txt").read_text(encoding="utf-8")
    _ids[name] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    model = getattr(model, "model", model)
    model.set_attn_implementation(attention)
    return model


def decoder(attention: str) -> Any:
    """12 layers of 12 heads, as long as anybody likes; random weights."""
    import transformers as hf

    return hf.LlamaConfig(
        vocab_size=1024, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        intermediate_size=2048, max_position_embeddings=LONGEST, attn_implementation=attention,
    )  # fmt: skip


def stream(name: str, vocabulary: int, length: int) -> torch.Tensor:
    """Tokens (length,): our text, again and again; for random weights any."""
    if name not in _ids:
        return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    ids = _ids[name]
    return torch.tensor((ids * (length // len(ids) + 1))[:length])


def batch(name: str, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """TOKENS tokens in sequences of this length, or one sequence."""
    rows = max(1, TOKENS // length)
    kind, _, padded = name.partition(", ")
    given = {"input_ids": stream(kind, vocabulary, rows * length).view(rows, length)}
    if padded:
        lengths = torch.linspace(0.1, 1.0, rows).mul(length).round()
        given["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    return given


def call(name: str, length: int, how: str) -> Callable[[], object]:
    """One forward pass: plain, watched with a set, or by somebody who holds the maps."""
    kind = name.partition(", ")[0]
    if how.startswith("TransformerLens"):
        return _lens(length, patterns="patterns" in how)
    model = body(kind, "eager" if how == "eager" else "sdpa")
    given = batch(name, length, model.config.vocab_size) | ({"use_cache": False} if _causal(kind) else {})
    return _pass(model, given, how)


def _causal(kind: str) -> bool:
    return kind in ("SmolLM2", "decoder")


def _pass(model: Any, given: dict[str, Any], how: str) -> Callable[[], object]:
    seen = watch(model, how) if how in WATCHED else None

    @torch.no_grad()
    def run() -> object:
        if seen is None:
            return model(**given, **({"output_attentions": True} if how == "eager" else {}))
        with seen:
            return model(**given)

    return run


def _lens(length: int, patterns: bool) -> Callable[[], object]:
    import transformers as hf
    from transformer_lens.model_bridge import TransformerBridge

    from bench.models import minilm

    torch.manual_seed(0)
    inner = hf.LlamaForCausalLM(decoder("eager")).eval()
    with tempfile.TemporaryDirectory() as folder:
        inner.config.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(
            folder, hf_model=inner, tokenizer=minilm()[1], device="cpu"
        )
    ids = batch("decoder", length, inner.config.vocab_size)["input_ids"]
    wanted = {"names_filter": lambda name: name.endswith("hook_pattern")} if patterns else {}

    @torch.no_grad()
    def run() -> object:
        return bridge.run_with_cache(ids, **wanted)

    return run


def held(name: str, length: int) -> int:
    """Bytes of all maps of a batch."""
    layers, heads = {"MiniLM": (6, 12), "SmolLM2": (30, 9)}.get(name, (12, 12))
    return max(1, TOKENS // length) * layers * heads * length * length * 4


def available() -> int:
    """Bytes of memory that nobody uses."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def lens_missing() -> str:
    try:
        from transformer_lens.model_bridge import TransformerBridge  # noqa: F401
    except ImportError as error:
        return f"TransformerLens was not run: {error}."
    return ""


def holders(name: str, length: int) -> list[str]:
    """Who can hold the maps of this model at this length, here."""
    there = [how for how, models in HOLDERS.items() if length in models.get(name, ())]
    if lens_missing():
        there = [how for how in there if how == "eager"]
    # Besides all maps, some copies of one layer's.
    return there if 1.3 * held(name, length) + 2 * GIB < available() else []


def raced(name: str, length: int, quick: bool) -> dict[str, Any]:
    """Seconds of a plain pass, how many times that the others take, and when that was measured."""
    kind = name.partition(", ")[0]
    model = body(kind)
    given = batch(name, length, model.config.vocab_size) | ({"use_cache": False} if _causal(kind) else {})
    contestants = {how: _pass(model, given, how) for how in ("plain", *WATCHED)}
    times = in_turns(contestants, 0.5 if quick or length >= 2048 else 8.0)
    ratios = {how: times[how] / times["plain"] for how in WATCHED}
    for how in holders(name, length):
        # One after the other, each against plain passes of its own: they do not fit side by side.
        pair = in_turns({"plain": contestants["plain"], how: call(name, length, how)}, 2.0)
        ratios[how] = pair[how] / pair["plain"]
        gc.collect()
    return {"plain": times["plain"], "ratios": ratios, "taken": f"{datetime.now(UTC):%m-%d %H:%M}"}


def timed(record: Record, quick: bool) -> tuple[str, list[tuple[str, float, str, float]]]:
    rows, goals = [], []
    for name, lengths in TIMED.items():
        for length in lengths[:1] if quick else lengths:
            where = f"{name}, {length}"
            found = record.once(where, partial(raced, name, length, quick))
            gc.collect()
            ratios = found["ratios"]
            shown = (_ratio(ratios, how) for how in _ways())
            rows.append([where, milliseconds(found["plain"]), *shown, found["taken"]])
            wanted = SHORT if length <= 512 else LONG if length == 8192 else {}
            goals += [(f"{where}: {how} over plain", ratios[how], "<=", most) for how, most in wanted.items()]
            if length == 4096 and "eager" in ratios:
                goals.append((f"{where}: eager over core", ratios["eager"] / ratios["core"], ">=", FASTER))
    return table(["", "plain, ms", *_ways(), "taken"], rows), goals


def _ways() -> list[str]:
    return [*WATCHED, *HOLDERS]


def _ratio(ratios: dict[str, float], how: str) -> str:
    return f"{ratios[how]:.2f}" if how in ratios else ""


def peaks(name: str, length: int) -> dict[str, int]:
    """Bytes of a process at its highest, for each way to run a model."""
    ways = ["plain", *WATCHED, *holders(name, length)]
    return {how: peak("watch:call", name=name, length=length, how=how).highest for how in ways}


def weighed(record: Record, quick: bool) -> tuple[str, list[tuple[str, float, str, float]]]:
    rows, goals = [], []
    for name, lengths in WEIGHED.items():
        for length in lengths[:1] if quick else lengths:
            where = f"{name}, {length}"
            sizes = record.once(f"{where}, bytes", partial(peaks, name, length))
            rows.append(
                [where, *(f"{sizes[how] / MIB:.0f}" if how in sizes else "" for how in ("plain", *_ways()))]
            )
            goals += [
                (f"{where}: memory, {how} over plain", sizes[how] / sizes["plain"], "<=", MEMORY)
                for how in WATCHED
            ]
            if length == 4096 and "eager" in sizes:
                goals.append(
                    (f"{where}: memory, eager over core", sizes["eager"] / sizes["core"], ">=", SMALLER)
                )
    return table(["peak of the process, MiB", "plain", *_ways()], rows), goals


def longest(record: Record) -> str:
    """One pass over LONGEST tokens, plain and watched, each in its own process."""

    def once(how: str) -> int:
        return peak("watch:call", name="decoder", length=LONGEST, how=how).highest

    found = {
        how: record.once(f"{LONGEST} tokens, {how}, bytes", partial(once, how)) for how in ("plain", "core")
    }
    plain, core = (f"{found[how] / GIB:.2f} GiB" for how in ("plain", "core"))
    maps = held("decoder", LONGEST) / GIB
    return (
        f"{LONGEST} tokens through the decoder in one pass: {plain} at the peak of the process, and watched "
        f"(core) {core}. Its maps would take {maps:.0f} GiB."
    )


def run(quick: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder) / "watch.json" if quick else RECORD)
        times, goals = timed(record, quick)
        sizes, more = weighed(record, quick)
        far = "" if quick else longest(record)
    parts = [
        times,
        f"Times the plain forward pass, of a batch of {TOKENS} tokens or one longer sequence, without the "
        "vocabulary head. MiniLM and SmolLM2 are the real models on real text; BERT-base and the decoder "
        "(12 layers of 12 heads of width 64, rotary) have their shape and random weights. Padded: sequences "
        "of 10% to 100% of the length. Who holds the maps is raced apart, against plain passes of its own, "
        f"at lengths where the maps fit the free memory. {lens_missing()}",
        sizes,
        far,
        targets(*goals, *more),
    ]
    return "\n\n".join(part for part in parts if part)
