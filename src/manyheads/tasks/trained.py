"""Trained models and their tasks, from the folder that train wrote: evaluate, predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from manyheads import tasks
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.progress import Progress, no_progress
from manyheads.training.evaluation import evaluate as measure

Folder = str | PathLike[str]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured.

    Attributes
    ----------
    task: the name of the model's task.
    metrics: by name, such as ``{"loss": 1.2, "perplexity": 3.3}``.
    examples: the number of examples that were measured.
    total: the number of examples in the data; more than ``examples`` after Ctrl-C.
    interrupted: whether Ctrl-C ended the evaluation early.
    """

    task: str
    metrics: dict[str, float]
    examples: int
    total: int
    interrupted: bool


def evaluate(
    folder: Folder,
    data: str | None = None,
    *,
    beams: int | None = None,
    batch_tokens: int = 4096,
    device: str | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """The metrics of a trained model on its validation data or on yours, for ``manyheads evaluate``."""
    task: Any
    task, model = tasks.load(str(folder), device)
    if beams is not None:
        if not hasattr(task, "beams"):
            raise ValueError(f"beams: {task.name} has none; leave the option out")
        task.beams = beams
    examples = tasks.held_out(str(folder), task) if data is None else tasks.read_data(str(folder), task, data)
    measured = 0

    def count(batch: int) -> None:
        nonlocal measured
        measured += batch
        progress("measure", measured, len(examples))

    with interruptible():
        metrics = measure(task, model, examples, batch_tokens=batch_tokens, step=count, partly=True)
        stopped = interrupted()
    return Evaluation(task.name, metrics, measured, len(examples), stopped)


def predict(
    folder: Folder, inputs: Sequence[str], *, device: str | None = None, **options: object
) -> list[str]:
    """The output of a trained model for each input: what ``manyheads predict`` prints."""
    task, model = tasks.load(str(folder), device)
    if not inputs:
        raise ValueError("input: expected one or more to predict from, got none")
    try:
        return task.predict(model, list(inputs), **options)
    except TypeError as error:
        if options and "unexpected keyword" in str(error):
            names = ", ".join(options)
            raise ValueError(f"{task.name} takes other options than {names}; see --help") from error
        raise
