"""``manyheads train TASK``: a transformer trained on a task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import manyheads as mh
from manyheads.common.processes import rank
from manyheads.view import terminal


def train(
    task: str,
    options: Mapping[str, object],
    *,
    out: Path,
    tracker: str = "tensorboard",
    json: bool = False,
    **settings: Any,
) -> str | None:
    """Train a transformer on a task, on your data or on an embedded example of it.

    The folder it writes is a model: evaluate, predict, inspect, prune and the others take it.

    Ctrl-C keeps a checkpoint, and --resume continues from it, to the bit, as it does after a crash.
    Several processes share the work with `torchrun --nproc-per-node 2 -m manyheads train TASK ...`.

    [bold]Examples[/bold]

      manyheads train language --data book.txt --heads 8
      manyheads train translation --data corpus/train --source en --target de
    """
    with terminal.training.training_bar(task, hidden=json or rank() > 0) as show:
        trackers = [] if tracker == "none" else [tracker]
        result = mh.tasks.train_task(task, options, out=out, callbacks=[show], trackers=trackers, **settings)
    files = settings.get("data"), settings.get("valid")
    if rank() == 0:
        terminal.training.print_training(result, *files, as_json=json)
    return terminal.training.how_to_resume(result, task, *files)
