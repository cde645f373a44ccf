"""one update of a whole language model (loss, gradient, clipping, AdamW) against the models people train.

Processor time of one thread, so that other work on the machine counts little.
"""

import shutil
import time

import torch

from bench.decoders import BIASED, BUILDERS, BUILT_ALIKE, GPT2, NANO, OURS, Shape, step
from bench.harness import against, geometric_mean, milliseconds, race, say, table, targets

SIZES = ((128, 4, 4), (384, 6, 2), (768, 12, 1))  # width, heads, layers
CONTEXTS = ((64, 12), (512, 2), (2048, 1))  # context, batch
RATES = (0.0, 0.1)
COMPILED = (OURS, NANO, GPT2)


def run(quick: bool) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(quick)
    finally:
        torch.set_num_threads(threads)


def _run(quick: bool) -> str:
    sizes, contexts = (SIZES[:1], CONTEXTS[:1]) if quick else (SIZES, CONTEXTS)
    cells = [
        (Shape(width, heads, layers, context, dropout=rate), batch, False)
        for width, heads, layers in sizes
        for context, batch in contexts
        for rate in RATES
    ]
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler and not quick:
        width, heads, layers = SIZES[0]
        context, batch = CONTEXTS[0]
        cells += [(Shape(width, heads, layers, context, dropout=rate), batch, True) for rate in RATES]
    rows, ratios, with_biases = [], {}, {}
    for shape, batch, compiled in cells:
        names = COMPILED if compiled else tuple(BUILDERS)
        contestants = {name: step(name, shape, batch, compiled) for name in names}
        times = race(contestants, quick, seconds=5.0, clock=time.process_time)
        peers = [name for name in names if name in BUILT_ALIKE]
        fastest, ratio = against(times, OURS, peers)
        name = f"{shape.width}, {shape.context}, dropout {shape.dropout}{', compiled' if compiled else ''}"
        ratios[name] = ratio
        biased = "-"
        if BIASED in times:
            with_biases[name] = times[GPT2] / times[BIASED]
            biased = f"{with_biases[name]:.2f}"
        rows.append(
            [f"{shape}", shape.context, batch, shape.dropout, "compiled" if compiled else "eager"]
            + [milliseconds(times[other]) if other in times else "-" for other in BUILDERS]
            + [fastest, f"{ratio:.2f}", biased]
        )
        say(f"{name}: {ratio:.2f} of {fastest}")
    worst = min(ratios, key=lambda name: ratios[name])
    lowest = min(with_biases, key=lambda name: with_biases[name])
    without = [ratio for name, ratio in ratios.items() if "dropout 0.0" in name]
    return "\n\n".join(
        [
            table(
                [
                    "model",
                    "context",
                    "batch",
                    "dropout",
                    "mode",
                    *BUILDERS,
                    "fastest peer",
                    "ratio",
                    "biases",
                ],
                rows,
            ),
            "Milliseconds of processor time, one thread, float32, 65 tokens in the vocabulary, AdamW fused for "
            "all. Ratio: the fastest peer's time over ours without biases, as nanoGPT and x-transformers are "
            "built; biases: transformers' time over ours with biases, as it is built. Dropout is on attention "
            "weights, embeddings and the output of each sublayer (x-transformers: the hidden layer instead)."
            + ("" if compiler else " No compiler on this machine: eager only."),
            targets(
                ("geometric mean", geometric_mean(list(ratios.values())), ">=", 1.05),
                (f"smallest ({worst})", ratios[worst], ">=", 0.95),
                ("geometric mean without dropout", geometric_mean(without), ">=", 1.05),
                ("geometric mean with biases", geometric_mean(list(with_biases.values())), ">=", 1.05),
                (f"smallest with biases ({lowest})", with_biases[lowest], ">=", 0.95),
            ),
        ]
    )
