"""attention inside a window of 256, or inside chunks of 256, at length 8192.

The peer is torch's scaled_dot_product_attention (SDPA) with the whole (length, length) mask,
boolean or additive.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness import against, mebibytes, milliseconds, race, say, table, targets
from bench.inputs import MODES, heads_of, timed
from bench.memory import peak
from manyheads.nn.attention import attention

BATCH, HEADS, LENGTH, WIDTH, SIZE = 1, 8, 8192, 64, 256
KINDS = ("window", "causal window", "chunk")
CONTESTANTS = ("manyheads", "SDPA, boolean mask", "SDPA, additive mask")


def square(kind: str) -> Tensor:
    """(length, length), True where query i may attend to key j."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    if kind == "chunk":
        return i // SIZE == j // SIZE
    near = (i - j).abs() < SIZE
    return near & (j <= i) if kind == "causal window" else near


def step(name: str, kind: str, mode: str):
    torch.manual_seed(0)
    inputs = [heads_of(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]
    if name == "manyheads":
        option = {"chunk": SIZE} if kind == "chunk" else {"window": SIZE, "causal": kind == "causal window"}
        return timed(mode, lambda q, k, v: attention(q, k, v, **option), inputs)
    mask = square(kind)
    if "additive" in name:
        mask = torch.zeros(LENGTH, LENGTH).masked_fill_(~mask, -torch.inf)
    return timed(mode, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), inputs)


def run(quick: bool) -> str:
    rows, ratios = [], {}
    for kind in KINDS:
        for mode in MODES:
            contestants = {name: step(name, kind, mode) for name in CONTESTANTS}
            if mode == "forward":
                answers = [contestants[name]() for name in CONTESTANTS[:2]]
                torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)
            times = race(contestants, quick)
            _, ratio = against(times, "manyheads", CONTESTANTS[1:])
            ratios[kind, mode] = ratio
            memory = peak("window:step", name="manyheads", kind=kind, mode=mode).extra
            shown = [milliseconds(times[name]) for name in CONTESTANTS]
            rows.append([f"{kind}, {mode}", *shown, f"{ratio:.2f}", mebibytes(memory)])
            say(f"{kind} {mode}: {ratio:.2f}")
    return "\n\n".join(
        [
            table(["", *(f"{name}, ms" for name in CONTESTANTS), "ratio", "manyheads, MiB"], rows),
            f"Batch {BATCH}, {HEADS} heads of width {WIDTH}. The ratio is to the faster mask, made before: "
            f"it takes {LENGTH**2 // 2**20} MiB boolean, {LENGTH**2 * 4 // 2**20} MiB additive. "
            "Same answers to 1e-5.",
            targets(*((f"{kind}, {mode}", ratio, ">=", 5.0) for (kind, mode), ratio in ratios.items())),
        ]
    )
