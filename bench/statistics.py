"""what it costs to measure every head while attending.

Attention together with its statistics, against attention alone; the core set and the full set.
"""

import time
from collections.abc import Callable, Mapping

import torch

from bench.harness import MIB, STEADY, mebibytes, milliseconds, say, table, targets
from bench.inputs import heads_of
from bench.memory import peak
from manyheads.nn.attention import attention
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.statistics import statistics

HEADS, WIDTH, TOKENS = 8, 64, 8192
SETS = {"core": 2.2, "full": 3.5}  # times the plain call
MEMORY = 64  # MiB


def function(which: str | None, length: int, causal: bool, alone: bool = False):
    """Attention, then statistics if a set is named; `alone` leaves the attention out, to weigh them."""
    q, k, v = (heads_of(TOKENS // length, HEADS, length, WIDTH) for _ in range(3))

    @torch.no_grad()
    def call() -> object:
        out = None if alone else attention(q, k, v, causal=causal)
        return out, statistics(q, k, causal=causal, statistics=which) if which else None

    return call


def module(which: str | None, length: int, causal: bool):
    mha = MultiHeadAttention(HEADS * WIDTH, HEADS).eval()
    x = torch.randn(TOKENS // length, length, HEADS * WIDTH)

    @torch.no_grad()
    def call() -> object:
        return mha(x, causal=causal, return_statistics=which or False)

    return call


def in_turns(contestants: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Like `race`, but nobody leaves: who is three times slower gets as many chances to be undisturbed."""
    calls: dict[str, list[float]] = {name: [] for name in contestants}
    started = time.perf_counter()
    while True:
        spent, rounds = time.perf_counter() - started, min(map(len, calls.values()))
        steady = rounds >= 3 and all(sorted(times)[2] <= STEADY * min(times) for times in calls.values())
        if rounds >= 2 and (spent > 3 * seconds or (steady and spent > seconds)):
            break
        for name, contestant in contestants.items():
            before = time.perf_counter()
            contestant()
            calls[name].append(time.perf_counter() - before)
    return {name: min(times) for name, times in calls.items()}


def run(quick: bool) -> str:
    rows, goals = [], []
    for level, make in (("function", function), ("module", module)):
        for length in (2048,) if quick else (2048, 4096, 8192):
            for causal in (False, True):
                contestants = {which or "plain": make(which, length, causal) for which in (None, *SETS)}
                times = in_turns(contestants, 0.5 if quick else 12.0)
                ratios = {which: times[which] / times["plain"] for which in SETS}
                where = f"{level}, {length}{', causal' if causal else ''}"
                memory = ["", ""]
                goals += [
                    (f"{where}: {which} over plain", ratios[which], "<=", SETS[which]) for which in SETS
                ]
                if level == "function":
                    arguments = {"length": length, "causal": causal, "alone": True}
                    peaks = {
                        which: peak("statistics:function", which=which, **arguments).extra for which in SETS
                    }
                    goals += [
                        (f"{where}: {which}, MiB", size / MIB, "<=", MEMORY) for which, size in peaks.items()
                    ]
                    memory = [mebibytes(size) for size in peaks.values()]
                shown = [milliseconds(time) for time in times.values()]
                rows.append([where, *shown, *(f"{ratio:.2f}" for ratio in ratios.values()), *memory])
                say(f"{where}: core {ratios['core']:.2f}, full {ratios['full']:.2f}")
    header = ["", "plain, ms", "with core, ms", "with full, ms", "core", "full", "core, MiB", "full, MiB"]
    return "\n\n".join(
        [
            table(header, rows),
            f"{TOKENS} tokens, {HEADS} heads of width {WIDTH}. Memory is that of the statistics call itself.",
            targets(*goals),
        ]
    )
