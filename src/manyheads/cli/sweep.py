"""``manyheads sweep TASK``: how many heads a task needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from manyheads.cli.train import OF_RUN, option, task_verb

NUMBERS = ("heads", "kv_heads", "d_key", "d_value", "seeds")
LISTS = [
    option("heads", str, "Numbers of heads to try.", "1,2,4,8,16"),
    option("kv_heads", str, "Numbers of key and value heads to try; all by default."),
    option("d_key", str, "Widths of a head's queries and keys to try; d_model / heads by default."),
    option("d_value", str, "Widths of a head's values to try; d_model / heads by default."),
    option("seeds", str, "How many seeds, or which: 3, or 5,6,7.", "3"),
    option("equal", str, "What is held equal: parameters, compute (by steps) or nothing.", "parameters"),
    option("sampler", str, "grid for all combinations; tpe or random for some that Optuna proposes.", "grid"),
    option("trials", int, "How many runs tpe or random may propose."),
    option(
        "storage", str, "URL of a database for Optuna, as sqlite:///sweep.db; a file in --out by default."
    ),
]


def run(
    task: str, options: Mapping[str, object], *, out: Path | None = None, json: bool = False, **settings: Any
) -> str | None:
    """Sweep, and print what came of it."""
    with Console(stderr=True).status("Loading torch"):
        from manyheads import tasks
        from manyheads.tasks.train import split_options
        from manyheads.training.sweep import sweep as sweep_task
        from manyheads.view.progress_bar import progress_bar
        from manyheads.view.terminal.presentation import present
        from manyheads.view.terminal.sweep import SweepPresentation, how_it_ended

        described, training = split_options(task, options)
        built = tasks.build(described)
    settings |= {name: numbers(settings[name], name) for name in NUMBERS if name in settings}
    with progress_bar(Console(stderr=True)) as progress:
        settings["callbacks"] = [lambda report: progress("run", report.step, report.steps)]
        out = out or Path("out/sweep") / task
        result = sweep_task(built, out=out, progress=progress, **settings, **training)
    present(SweepPresentation(result), as_json=json)
    return how_it_ended(result)


def numbers(text: str, option: str) -> int | list[int]:
    """A whole number, or several with commas between.

    >>> numbers("3", "seeds"), numbers("1, 2,4", "heads")
    (3, [1, 2, 4])
    """
    try:
        listed = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: got {text!r}; expected whole numbers, as in 1,2,4") from None
    return listed if "," in text else listed[0]


sweep = task_verb(
    "sweep",
    run,
    """How many heads? Train a task with several numbers of heads and seeds, and compare them.

Every run is a model in a folder of its own. The table has means with intervals, time, memory and cache; the
answer says which settings are best, and which cannot be told apart.

Ctrl-C keeps a checkpoint, and the same command goes on from there, as it does after a crash. The same command
in another terminal, or on another machine with the same folder, shares the work. Add heads or --seeds later:
only what is missing is run.

[bold]Examples[/bold]

  manyheads sweep language --heads 1,2,4,8 --seeds 3
  manyheads sweep translation --data corpus/train --equal compute --d-key 8,16,32 --steps 2000
  manyheads sweep series --heads 8 --kv-heads 1,2,4,8 --equal nothing
""",
    [each for each in OF_RUN if each.name not in ("resume", "tracker")] + LISTS,
    Path("out/sweep"),
)
