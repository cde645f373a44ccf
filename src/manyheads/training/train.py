"""train: the model of a task is trained, in a folder that is locked, logged and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from manyheads.common.interrupts import interruptible
from manyheads.common.json_files import in_one_sentence
from manyheads.common.locks import LOCK, locked
from manyheads.common.out_folder import writing
from manyheads.common.preserved_state import untouched
from manyheads.training.log import Log
from manyheads.training.loop import KEPT, Callback, Loop, Result
from manyheads.training.options import Options, with_options
from manyheads.training.report import Report, log_line, track_step
from manyheads.training.run_folder import Run
from manyheads.training.task import Data, Task


def train(
    task: Task,
    data: str | None = None,
    *,
    out: str | PathLike[str],
    valid: str | None = None,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    trackers: Sequence[str] = (),
    **options: Any,
) -> Result:
    """Train the model of a task; the best weights by its metric are written to a folder that `load` reads.

    Parameters
    ----------
    task: such as ``mh.tasks.find("language")()``; its fields are the options of the data and the model.
    data: what to train on, as the task reads it. Default: the task's embedded data.
    out: the folder of the run.
    valid: what to validate on. Default: a part of the data is held out.
    resume: continue the run in ``out`` after its last checkpoint, with the same batches, losses and weights
        as if it had never stopped.
    callbacks: called with a `Report` after every step.
    trackers: names of Accelerate's trackers, such as "tensorboard", which writes under ``out``.
    options: those of `manyheads.training.options.Options`, such as ``steps`` and ``learning_rate``; the
        task sets its own defaults for some.

    Ctrl-C ends the run after a checkpoint; a second one raises KeyboardInterrupt at once. While it runs, no
    other process can train in the same folder.

    Examples
    --------
    >>> import tempfile
    >>> import manyheads as mh
    >>> task = mh.tasks.find("language")(context=16, d_model=8, heads=2, layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = mh.train(task, out=folder, steps=3, batch_tokens=64, evaluate_examples=2, watch_every=0)
    >>> result.ended, sorted(result.metrics)
    ('finished', ['bits_per_byte', 'loss', 'perplexity'])

    See Also
    --------
    evaluate, predict : use the trained model.
    load : the model of the folder.

    References
    ----------
    Loshchilov and Hutter 2019, Decoupled weight decay regularization (AdamW).
    """
    chosen = with_options(task.training, options)
    run = Run(Path(out))
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != chosen.precision:
        AcceleratorState._reset_state()  # left by a run before this one; it would forbid another precision
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else its processes would not find each other there
        mixed_precision=chosen.precision,
        log_with=list(trackers) or None,
        project_dir=str(run.out),
    )
    with ExitStack() as held:
        if accelerator.is_main_process:
            held.enter_context(locked(run.out / LOCK, f"out: {run.out}"))
            opened = _begin(task, run, chosen, data, valid, resume)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:  # a vocabulary is learned once, and the others read it
            task.restore(run.out)
            opened = task.open(data, valid)
        held.enter_context(training_conditions(accelerator.device))
        held.enter_context(interruptible())
        try:
            loop = Loop(task, opened, run, chosen, accelerator)
        except ValueError:
            if accelerator.is_main_process and not resume:
                run.config.unlink()  # no run began: the folder is free for the next try
            raise
        with ExitStack() as stack:
            reports = [*callbacks]
            if accelerator.is_main_process:
                log = stack.enter_context(Log(run.log, loop.step))
                reports.append(partial(_add, log, run.out))
            if trackers:
                accelerator.init_trackers(task.name)
                stack.callback(accelerator.end_training)
                reports.append(lambda report: track_step(report, accelerator))
            ended = loop.run_to_the_end(reports)
        return loop.result(ended)


def _begin(task: Task, run: Run, options: Options, data: str | None, valid: str | None, resume: bool) -> Data:
    run.tidy()
    if resume and run.config.exists():
        with in_one_sentence(f"{run.config}: damaged, or not what train wrote"):
            task.restore(run.out)
        opened = task.open(data, valid)
        run.check(task, options)
    else:
        run.free()
        opened = task.open(data, valid)
        run.begin(task, options, data, valid)
    return opened


def _add(log: Log, out: Path, report: Report) -> None:
    with writing(out, KEPT):
        log.add(log_line(report))


@contextmanager
def training_conditions(device: torch.device) -> Iterator[None]:
    """The caller's random generators are left alone; denormal numbers do not slow the CPU down."""
    with untouched():
        torch.set_flush_denormal(device.type == "cpu")
        yield
