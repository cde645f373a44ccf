"""``manyheads sweep TASK``: how many heads a task needs."""

from collections.abc import Mapping
from pathlib import Path

import manyheads as mh
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def sweep(
    task: str, options: Mapping[str, object], *, out: Path, json: bool = False, **settings: object
) -> str | None:
    """How many heads? Train a task with several numbers of heads and seeds, and compare them.

    Every run is a model in a folder of its own. The table has means with intervals, time, memory and cache;
    the answer says which settings are best, and which cannot be told apart.

    Ctrl-C keeps a checkpoint, and the same command continues from there, also after a crash. The same
    command in another terminal, or on another machine with the same folder, shares the work. Add heads or
    --seeds later: only what is missing is run.

    [bold]Examples[/bold]

      manyheads sweep language --heads 1,2,4,8 --seeds 3
      manyheads sweep translation --data corpus/train --equal compute --d-key 8,16,32 --steps 2000
      manyheads sweep series --heads 8 --kv-heads 1,2,4,8 --equal nothing
    """
    with progress_bar() as progress:
        show = [lambda report: progress("run", report.step, report.steps)]
        result = mh.tasks.sweep_task(task, options, out=out, callbacks=show, progress=progress, **settings)
    terminal.presentation.present(terminal.sweep.SweepPresentation(result), as_json=json)
    return terminal.sweep.how_it_ended(result)
