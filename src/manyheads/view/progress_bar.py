"""How far work is, drawn on a terminal: the one bar behind every ``progress=`` of the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from manyheads.common.language import words
from manyheads.common.progress import Progress

# Stages as a person reads them; others are shown by their names.
STAGES = {
    "watch": "Watching",
    "diversity": "Comparing heads",
    "measure": "Measuring",
    "compare": "Comparing",
    "rank": "Ranking",
    "cut": "Cutting",
    "merge": "Merging key heads",
    "fit": "Fitting layer by layer",
    "price": "Pricing heads",
    "refit": "Refitting",
    "recover": "Recovering",
    "curve": "Curve",
    "count": "Counting operations",
    "sweep": "Runs",
    "run": "Steps of this run",
    "shards": "Parts of the text",
}


@contextmanager
def progress_bar(
    doing: str = "", *, unit: str = "", hidden: bool = False, console: Console | None = None
) -> Iterator[Progress]:
    """A `Progress` that draws a bar for each stage, and removes them at the end.

    It draws on a terminal and in a notebook, and nothing elsewhere.

    Parameters
    ----------
    doing: a word before the name of each stage, such as "Reading".
    unit: what is counted, such as "tokens": then the speed is shown, too.
    hidden: draw nothing: for all but the first of several processes.
    console: where to draw; on stderr by default.

    >>> with progress_bar() as progress:
    ...     progress("refit", 3, 12)
    """
    console = console or Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    columns += [TextColumn("{task.fields[speed]}"), TimeRemainingColumn()]
    drawn = not hidden and (console.is_terminal or console.is_jupyter)
    with Bars(*columns, console=console, transient=True, disable=not drawn) as bars:
        tasks: dict[str, TaskID] = {}
        started: dict[str, float] = {}
        last = perf_counter()  # a stage begins when the one before it was heard of last

        def progress(stage: str, done: float, total: float | None) -> None:
            nonlocal last
            if stage not in tasks:
                name = f"{words(doing)} {words(STAGES.get(stage, stage))}".strip()
                tasks[stage], started[stage] = bars.add_task(name, total=total, speed=""), last
            last = perf_counter()
            speed = f"{done / (last - started[stage]):,.0f} {unit}/s" if unit and done else ""
            bars.update(tasks[stage], completed=done, total=total, speed=speed)

        yield progress
