"""How far training is: a bar on a terminal, a line for every evaluation elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from manyheads.heads.table import HeadTable
from manyheads.training.log import Line

SMOOTH = 0.9  # how much of the loss and the speed shown is that of the steps before
TRACK_EVERY = 10  # trackers flush every time, which takes as long as a step of a small model


@contextmanager
def progress(console: Console, steps: int, metric: str) -> Iterator[Callable[[Report], None]]:
    """A callback that shows loss, metric, tokens a second, dead heads and the time left."""
    columns = (
        TextColumn("Training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    loss = seconds = tokens = 0.0
    known: dict[str, str] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=steps, told="")

        def tell(report: Report) -> None:
            nonlocal loss, seconds, tokens
            loss = SMOOTH * loss + (1 - SMOOTH) * report.loss if seconds else report.loss
            seconds = SMOOTH * seconds + report.seconds
            tokens = SMOOTH * tokens + report.tokens
            if report.metrics:
                known[metric] = f"{metric} {report.metrics[metric]:.3f}"
            if report.heads is not None:
                dead = int(report.heads["dead"].sum())
                known["dead"] = f"{dead} of {len(report.heads)} heads dead" if dead else ""
            speed = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
            told = "  ".join(filter(None, [f"loss {loss:.3f}", *known.values(), speed]))
            bar.update(shown, completed=report.step, told=told)
            if report.metrics:
                mark = " *" if report.best else ""
                bar.console.print(f"step {report.step:,}  {told}{mark}", highlight=False)

        yield tell


@dataclass
class Report:
    """What a callback receives after every step."""

    step: int  # how many updates were made
    steps: int  # how many there will be
    loss: float  # of this step's batch
    rate: float
    gradient_norm: float  # before clipping
    tokens: int  # predicted in this step
    seconds: float  # this step took
    metrics: dict[str, float] = field(default_factory=dict)  # after an evaluation
    best: bool = False  # these are the best so far
    heads: HeadTable | None = None  # if the heads were measured in this step


def line(report: Report) -> Line:
    """The line of a step in the log: only what is the same when the run is made again."""
    numbers: Line = {
        "step": report.step,
        "loss": report.loss,
        "rate": report.rate,
        "gradient_norm": report.gradient_norm,
        "tokens": report.tokens,
    }
    if report.metrics:
        numbers |= {"valid": report.metrics, "best": report.best}
    return numbers


def track(report: Report, accelerator: Accelerator) -> None:
    if report.step % TRACK_EVERY == 0 or report.metrics or report.heads is not None:
        accelerator.log(scalars(report), step=report.step)


def scalars(report: Report) -> dict[str, float]:
    """The scalars for trackers."""
    speed = report.tokens / max(report.seconds, 1e-9)
    values = {
        "train/loss": report.loss,
        "train/learning_rate": report.rate,
        "train/gradient_norm": report.gradient_norm,
        "train/tokens_per_second": speed,
    }
    values |= {f"valid/{name}": value for name, value in report.metrics.items()}
    if report.heads is not None:
        table = report.heads
        for name in ("entropy", "redundancy", "gradient_norm"):
            for row, value in zip(table.rows, table[name].tolist(), strict=True):
                if math.isfinite(value):
                    values[f"heads/{name}/{row.site}.{row.head}"] = value
        values["heads/dead"] = float(table["dead"].sum())
    return values
