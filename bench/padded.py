"""a padded batch, lengths spread evenly from 10% to 100% of the longest.

The peer is torch's scaled_dot_product_attention (SDPA) with the padding as a mask over keys, which computes
what it hides. Ours is told the lengths: of the keys only (same answer everywhere), or of the queries too
(padded positions give zeros, which is what self-attention needs).
"""

import torch
from torch.nn import functional as F

from bench.harness import against, mebibytes, milliseconds, race, say, table, targets
from bench.inputs import MODES, heads_of, timed
from bench.memory import peak
from manyheads.nn import mask
from manyheads.nn.attention import attention

BATCH, HEADS, WIDTH = 10, 8, 64
OURS = ("manyheads", "manyheads, keys only")
CONTESTANTS = (*OURS, "SDPA, boolean mask", "SDPA, additive mask")


def step(name: str, longest: int, mode: str):
    torch.manual_seed(0)
    inputs = [heads_of(BATCH, HEADS, longest, WIDTH) for _ in range(3)]
    lengths = torch.linspace(0.1, 1.0, BATCH).mul(longest).round().long()
    if name in OURS:
        padding = mask.padding(lengths, queries=lengths if name == "manyheads" else None)
        return timed(mode, lambda q, k, v: attention(q, k, v, mask=padding), inputs)
    shown = (torch.arange(longest) < lengths[:, None])[:, None, None]  # (batch, 1, 1, keys)
    if "additive" in name:
        shown = torch.zeros(shown.shape).masked_fill_(~shown, -torch.inf)
    return timed(mode, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=shown), inputs)


def run(quick: bool) -> str:
    rows, goals = [], []
    for longest in (2048, 512):
        for mode in MODES:
            contestants = {name: step(name, longest, mode) for name in CONTESTANTS}
            if mode == "forward":
                torch.testing.assert_close(
                    contestants[OURS[1]](), contestants["SDPA, boolean mask"](), atol=1e-5, rtol=1e-4
                )
            times = race(contestants, quick)
            ratios = [against(times, name, CONTESTANTS[2:])[1] for name in OURS]
            memory = [
                peak("padded:step", name=name, longest=longest, mode=mode).extra for name in CONTESTANTS[::2]
            ]
            rows.append(
                [f"{longest}, {mode}"]
                + [milliseconds(times[name]) for name in CONTESTANTS]
                + [f"{ratio:.2f}" for ratio in ratios]
                + [mebibytes(size) for size in memory]
            )
            goals.append((f"{longest}, {mode}", ratios[0], ">=", 1.7))
            say(f"{longest} {mode}: {ratios[0]:.2f}, keys only {ratios[1]:.2f}")
    header = [
        "longest",
        *(f"{name}, ms" for name in CONTESTANTS),
        "ratio",
        "keys only",
        "manyheads, MiB",
        "SDPA, MiB",
    ]
    return "\n\n".join(
        [
            table(header, rows),
            f"Batch {BATCH}, {HEADS} heads of width {WIDTH}, 45% of all positions are padding. "
            "Ratios to the faster mask. Same answers to 1e-5.",
            targets(*goals),
        ]
    )
