"""generation with a cache, token by token, against transformers' generate; and the memory that it reads.

Processor time of one thread, so that other work on the machine counts little.
"""

import time
from collections.abc import Callable

import torch

from bench.decoders import BIASED, GPT2, Shape, build
from bench.harness import milliseconds, race, say, table, targets
from manyheads.nn.generate import generate

SIZES = ((384, 6, 6), (768, 12, 4))  # width, heads, layers
CELLS = ((1, 32, 1), (8, 32, 1), (1, 1024, 1), (8, 1024, 1), (1, 32, 5), (1, 1024, 5))  # batch, prompt, beams
QUICK = ((1, 32, 1), (8, 32, 1), (1, 32, 5))
NEW = 128
CACHES = {"transformers": "dynamic", "transformers, static cache": "static"}


def ours(shape: Shape, batch: int, prompt: int, new: int, beams: int) -> Callable[[], object]:
    model = build(BIASED, shape).eval()
    ids = torch.randint(shape.vocabulary, (batch, prompt))
    return lambda: generate(model, ids, new_tokens=new, beams=beams)


def theirs(shape: Shape, batch: int, prompt: int, new: int, beams: int, cache: str) -> Callable[[], object]:
    model = build(GPT2, shape).eval()
    ids = torch.randint(shape.vocabulary, (batch, prompt))
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    options |= {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": beams}

    def call() -> None:
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), use_cache=True, pad_token_id=0, **options
        )
        assert written.shape[1] == prompt + new

    return call


def read_bytes(shape: Shape, prompt: int, new: int) -> float:
    """The bytes of weights and of cached keys and values that one step of one sequence reads, on average."""
    weights = sum(p.numel() for p in build(BIASED, shape).parameters())
    weights -= shape.context * shape.width  # of the positions a step reads one row
    return 4 * (weights + shape.layers * 2 * shape.width * (prompt + new / 2))


def bandwidth() -> float:
    """Bytes per second that one thread reads from memory, by summing up 256 MiB."""
    numbers = torch.ones(2**26)
    return 4 * numbers.numel() / race({"sum": numbers.sum}, seconds=2.0, clock=time.process_time)["sum"]


def run(quick: bool) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    new, rows = 32 if quick else NEW, []
    greedy, beamed, shares = {}, {}, {}
    for width, heads, layers in SIZES[:1] if quick else SIZES:
        for batch, prompt, beams in QUICK if quick else CELLS:
            shape = Shape(width, heads, layers, prompt + new)
            sizes = (shape, batch, prompt, new, beams)
            contestants = {"manyheads": ours(*sizes)}
            contestants |= {name: theirs(*sizes, cache) for name, cache in CACHES.items()}
            contestants["prompt"] = ours(shape, batch, prompt, 1, 1)
            times = _times(contestants, quick)
            ratio = min(times[name] for name in CACHES) / times["manyheads"]
            cell = f"{width}, batch {batch}, prompt {prompt}" + (f", {beams} beams" if beams > 1 else "")
            (greedy if beams == 1 else beamed)[cell] = ratio
            share = "-"
            if batch == beams == 1:
                step = (times["manyheads"] - times["prompt"]) / (new - 1)
                shares[cell] = read_bytes(shape, prompt, new) / bandwidth() / step
                share = f"{shares[cell]:.2f}"
            figures = [milliseconds(times[name]) for name in ("manyheads", "prompt", *CACHES)]
            rows.append([str(shape), batch, prompt, beams, *figures, f"{ratio:.2f}", share])
            say(f"{cell}: {ratio:.2f}, of the memory bound {share}")
    torch.set_num_threads(threads)
    header = ["model", "batch", "prompt", "beams", "manyheads", "its prompt", *CACHES, "ratio", "of bound"]
    worst, lowest, least = (min(values, key=values.get, default="") for values in (greedy, shares, beamed))
    goals = [
        (f"greedy, smallest ({worst})", greedy[worst], ">=", 1.3),
        (f"share of the memory bound, smallest ({lowest})", shares[lowest], ">=", 0.6),
    ]
    if beamed:
        goals.append((f"beams, smallest ({least})", beamed[least], ">=", 1.5))
    return "\n\n".join(
        [
            table(header, rows),
            f"Milliseconds of processor time for {new} new tokens, prompt included; one thread, float32, "
            "GPT-2 with 65 tokens in the vocabulary. Ratio: transformers' time, with its faster cache, over "
            "ours. Of bound: the time to read all weights and the cache once at the speed of a sum over "
            "256 MiB, measured beside each cell, over the time of a step.",
            targets(*goals),
        ]
    )


def _times(contestants: dict[str, Callable[[], object]], quick: bool) -> dict[str, float]:
    with torch.no_grad():
        return race(contestants, True, clock=time.process_time) if quick else _three_rounds(contestants)


def _three_rounds(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The fastest of three calls each, in turn; none to warm up, since a call is long itself."""
    times = dict.fromkeys(contestants, float("inf"))
    for _ in range(3):
        for name, call in contestants.items():
            before = time.process_time()
            call()
            times[name] = min(times[name], time.process_time() - before)
    return times
