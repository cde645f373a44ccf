"""one update of a whole language model (loss, gradient, clipping, AdamW) against the models people train.

Processor time of one thread, so that other work on the machine counts little.
"""

import time

import torch

from bench.decoders import BIASED, BUILDERS, BUILT_ALIKE, GPT2, OURS, Shape, step
from bench.harness import against, geometric_mean, milliseconds, race, say, table, targets

SIZES = ((128, 4, 4), (384, 6, 2), (768, 12, 1))  # width, heads, layers
CONTEXTS = ((64, 12), (512, 2), (2048, 1))  # context, batch
RATES = (0.0, 0.1)
NOTE = (
    "Milliseconds of processor time, one thread, float32, 65 tokens in the vocabulary, AdamW fused for all. "
    "Ratio: the fastest peer's time over ours without biases, as nanoGPT and x-transformers are built; "
    "biases: transformers' time over ours with biases, as it is built. Dropout is on attention weights, "
    "embeddings and the output of each sublayer (x-transformers: the hidden layer instead)."
)


def run(quick: bool) -> str:
    sizes, contexts = (SIZES[:1], CONTEXTS[:1]) if quick else (SIZES, CONTEXTS)
    cells = [
        (Shape(width, heads, layers, context, dropout=rate), batch)
        for width, heads, layers in sizes
        for context, batch in contexts
        for rate in RATES
    ]
    return compare(cells, tuple(BUILDERS), quick)


def compare(
    cells: list[tuple[Shape, int]], names: tuple[str, ...], quick: bool, compiled: bool = False
) -> str:
    """A table of these models, one row for each shape and batch, and the targets."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows, ratios, with_biases = [], {}, {}
    for shape, batch in cells:
        contestants = {name: step(name, shape, batch, compiled) for name in names}
        times = race(contestants, quick, seconds=5.0, clock=time.process_time)
        fastest, ratio = against(times, OURS, [name for name in names if name in BUILT_ALIKE])
        cell = f"{shape.width}, {shape.context}, dropout {shape.dropout}"
        ratios[cell], with_biases[cell] = ratio, times[GPT2] / times[BIASED]
        figures = [*(milliseconds(times[name]) for name in names), fastest, f"{ratio:.2f}"]
        rows.append([str(shape), shape.context, batch, shape.dropout, *figures, f"{with_biases[cell]:.2f}"])
        say(f"{cell}: {ratio:.2f} of {fastest}, {with_biases[cell]:.2f} with biases")
    torch.set_num_threads(threads)
    worst, lowest = (min(values, key=values.__getitem__) for values in (ratios, with_biases))
    header = ["model", "context", "batch", "dropout", *names, "fastest peer", "ratio", "biases"]
    goals = targets(
        ("geometric mean", geometric_mean(list(ratios.values())), ">=", 1.05),
        (f"smallest ({worst})", ratios[worst], ">=", 0.95),
        ("geometric mean with biases", geometric_mean(list(with_biases.values())), ">=", 1.05),
        (f"smallest with biases ({lowest})", with_biases[lowest], ">=", 0.95),
    )
    return "\n\n".join([table(header, rows), NOTE, goals])
