"""How far training is: a bar on a terminal, a line for every evaluation elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from manyheads.training.report import Report

SMOOTH = 0.9  # how much of the loss and the speed shown is that of the steps before


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
