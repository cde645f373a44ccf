"""Real work for heads: one file a task, each with its data, model, loss, metric and prediction."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from manyheads.training.batches import Examples
    from manyheads.training.task import Task

# Where each task lives, and what it is, for people who have not loaded torch yet.
TASKS = {
    "language": ("manyheads.tasks.language:Language", "Learn a text: the next token, or hidden ones."),
    "images": ("manyheads.tasks.images:Images", "What a picture shows."),
    "series": ("manyheads.tasks.series:Series", "How columns of numbers go on."),
    "dna": ("manyheads.tasks.dna:DNA", "The class of a stretch of DNA."),
    "translation": ("manyheads.tasks.translation:Translation", "Sentences from one language to another."),
    "speech": ("manyheads.tasks.speech:Speech", "What is said in a recording: a word, or a string of words."),
    "picturebook": ("manyheads.tasks.picturebook:Picturebook", "Captions of pictures, in several languages."),
}


def find(name: str) -> type[Task]:
    """The class of a task by its name.

    >>> find("language").__name__
    'Language'
    """
    if name not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    where, _, what = TASKS[name][0].partition(":")
    found: type[Task] = getattr(import_module(where), what)
    return found


def restore(folder: str | Path) -> Task:
    """The task of a trained model, from the folder that train or save wrote."""
    from manyheads.training.run import read_config

    folder = Path(folder)
    described: dict[str, Any] = dict(read_config(folder)["task"])
    kind: Any = find(described.pop("name"))
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(described) - known):
        raise ValueError(f"{folder}: {unknown[0]!r} is no option of this manyheads; update it")
    task: Task = kind(**described)
    task.restore(folder)
    return task


def held_out(folder: str | Path, task: Task) -> Examples:
    """What training did not learn from: the validation examples of the run in this folder."""
    from manyheads.training.run import read_config

    training = read_config(Path(folder))["training"]
    return task.open(training["data"], training["valid"]).valid


def load(folder: str | Path, device: str | None = None) -> tuple[Task, nn.Module]:
    """A trained model with its task, ready to measure and to predict, on that device (`choose_device`)."""
    from manyheads.common.devices import choose_device
    from manyheads.surgery.files import load as load_model

    task = restore(folder)
    return task, load_model(folder).to(choose_device(device))
