"""Time contestants against each other, and write down what came out.

Timing is a race: contestants take turns, one call each per round, so that whatever else the machine is
doing hits all of them alike; the figure is the fastest call. Nothing here knows about attention.
"""

import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

MIB = 2**20
GIB = 2**30
SLOWER = 1.6
STEADY = 1.05
_console = Console(stderr=True, highlight=False)
_started = time.perf_counter()


def say(text: str) -> None:
    """One line of progress on stderr, with the seconds since the start."""
    _console.print(f"[dim]{time.perf_counter() - _started:7.1f} s[/dim]  {text}", soft_wrap=True)


def race(
    contestants: Mapping[str, Callable[[], object]],
    quick: bool = False,
    *,
    seconds: float = 8.0,
    clock: Callable[[], float] | None = None,
) -> dict[str, float]:
    """Fastest call of each contestant, in seconds, all running interleaved.

    One call each to warm up, then rounds until the time is up, and on for up to four times as long until
    everybody has come within STEADY of their fastest call three times: before that a neighbour on the machine
    may have decided who won. Who is more than SLOWER times slower than the fastest after two calls keeps the
    better of those two and leaves the race: its time is known well enough, and the rest of the budget is
    better spent on those that are close. ``clock`` may be `time.process_time`, for one thread on a busy
    machine.
    """
    seconds, fewest, most = (0.5, 2, 5) if quick else (seconds, 5, 500)
    clock = time.perf_counter if clock is None else clock
    calls: dict[str, list[float]] = {name: [] for name in contestants}
    racing = list(contestants)
    started = time.perf_counter()
    for number in range(-1, most):
        spent = time.perf_counter() - started
        if number >= fewest and spent > seconds:
            steady = all(sorted(calls[name])[2] <= STEADY * min(calls[name]) for name in racing)
            if quick or steady or spent > 4 * seconds:
                break
        first = number % len(racing)  # nobody is always first
        for name in racing[first:] + racing[:first]:
            before = clock()
            contestants[name]()
            calls[name].append(clock() - before)
        if number == 0:
            fastest = min(map(min, calls.values()))
            racing = [name for name in racing if min(calls[name]) <= SLOWER * fastest]
    return {name: min(times) for name, times in calls.items()}


def against(times: Mapping[str, float], ours: str, peers: Iterable[str]) -> tuple[str, float]:
    """The fastest of these peers, and how many times as fast as it we are."""
    fastest = min(peers, key=lambda name: times[name])
    return fastest, times[fastest] / times[ours]


@cache
def matmul_peak(size: int = 2048) -> float:
    """Floating-point operations per second of a large float32 matrix product: what this machine can do."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return 2 * size**3 / race({"matmul": lambda: torch.mm(a, b, out=out)})["matmul"]


def commit() -> str:
    """The commit that was measured, with a plus if files were changed since."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    name, changed = (
        subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
    )
    return name + ("+" if changed else "")


def machine(command: str) -> str:
    """Where the numbers come from, in one line of markdown."""
    parts = [
        _processor(),
        f"{torch.get_num_threads()} threads",
        f"float32 matmul {matmul_peak() / 1e9:.0f} GFLOP/s",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.1f} at the start",
        f"commit {commit()}",
    ]
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        parts.append(f"ATEN_CPU_CAPABILITY={capability}")
    if os.environ.get("THP_MEM_ALLOC_ENABLE"):
        parts.append("huge pages on")
    return f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {', '.join(parts)}."


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios: twice as fast and twice as slow cancel.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(math.log(value) for value in values) / len(values))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table, padded so that it also reads well in a terminal; numbers stand to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    )
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def targets(*goals: tuple[str, float, str, float]) -> str:
    """A table of (what, figure, ">=" or "<=", target) with a plain verdict in the last column."""
    rows = []
    for what, figure, sign, target in goals:
        reached = figure >= target if sign == ">=" else figure <= target
        rows.append([what, f"{figure:.4g}", f"{sign} {target:g}", "reached" if reached else "NOT REACHED"])
    return table(["target", "measured", "wanted", "verdict"], rows)


def milliseconds(seconds: float) -> str:
    """Three or so digits, whatever the size."""
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def mebibytes(size: float) -> str:
    return f"{size / MIB:.0f}" if abs(size) >= 10 * MIB else f"{size / MIB:.1f}"
