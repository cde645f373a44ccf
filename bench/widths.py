"""heads whose values are wider or narrower than their keys, length 2048.

On the CPU torch's scaled_dot_product_attention (SDPA) materialises all weights when the widths differ.
"""

import torch
from torch.nn import functional as F

from bench.harness import (
    geometric_mean,
    matmul_peak,
    mebibytes,
    milliseconds,
    race,
    say,
    table,
    targets,
)
from bench.inputs import MODES, heads_of, timed
from bench.memory import peak
from manyheads.nn.attention import attention

BATCH, HEADS, LENGTH = 2, 8, 2048
WIDTHS = ((64, 128), (64, 96), (64, 32))
GOAL = 3.0
FUNCTIONS = {"manyheads": attention, "SDPA": F.scaled_dot_product_attention}


def step(name: str, mode: str, d_key: int, d_value: int):
    torch.manual_seed(0)
    widths = (d_key, d_key, d_value)
    return timed(mode, FUNCTIONS[name], [heads_of(BATCH, HEADS, LENGTH, width) for width in widths])


def run(quick: bool) -> str:
    rows, ratios = [], []
    for d_key, d_value in WIDTHS[: 1 if quick else None]:
        for mode in MODES:
            contestants = {name: step(name, mode, d_key, d_value) for name in FUNCTIONS}
            if mode == "forward":
                torch.testing.assert_close(
                    contestants["manyheads"](), contestants["SDPA"](), atol=1e-5, rtol=1e-4
                )
            times = race(contestants, quick)
            memory = [
                peak("widths:step", name=name, mode=mode, d_key=d_key, d_value=d_value).extra
                for name in times
            ]
            ratios.append(times["SDPA"] / times["manyheads"])
            rows.append(
                [f"d_key {d_key}, d_value {d_value}, {mode}"]
                + [milliseconds(time) for time in times.values()]
                + [f"{ratios[-1]:.2f}", f"{_peak_for_goal(mode, d_key, d_value, times['SDPA']):.0%}"]
                + [mebibytes(size) for size in memory]
            )
            say(f"{rows[-1][0]}: {ratios[-1]:.2f}")
    return "\n\n".join(
        [
            table(
                ["", "manyheads, ms", "SDPA, ms", "ratio", "peak for 3x", "manyheads, MiB", "SDPA, MiB"], rows
            ),
            f"Batch {BATCH}, {HEADS} heads, length {LENGTH}; same answers to 1e-5. Peak for 3x: the share of "
            f"this machine's matrix product peak, {matmul_peak() / 1e9:.0f} GFLOP/s, that {GOAL:g} times "
            "SDPA's speed would take with nothing but the products needed; fused kernels reach about 70%.",
            targets(
                ("SDPA's time over ours, geometric mean", geometric_mean(ratios), ">=", GOAL),
                ("SDPA's time over ours, smallest", min(ratios), ">=", GOAL),
            ),
        ]
    )


def _peak_for_goal(mode: str, d_key: int, d_value: int, plain: float) -> float:
    """Scores and output forward; backward the scores again, their gradient, and those of q, k and v."""
    widths = d_key + d_value + (0 if mode == "forward" else 3 * d_key + 2 * d_value)
    return 2 * BATCH * HEADS * LENGTH**2 * widths / (plain / GOAL) / matmul_peak()
