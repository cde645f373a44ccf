"""Trained models and their tasks, from the folder that train wrote: open, evaluate, predict."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from torch import nn

from manyheads.common.devices import choose_device
from manyheads.common.errors import UnreadDataError
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.intervals import Interval
from manyheads.common.json_files import check_fields, in_one_sentence
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Keywords
from manyheads.data.labelled import Labelled, labelled
from manyheads.models import config as described
from manyheads.models.folder import load as load_model
from manyheads.models.loaded import Loaded
from manyheads.models.open import open_model
from manyheads.tasks import find
from manyheads.training.evaluation import evaluate as measure
from manyheads.training.run_folder import read_config

if TYPE_CHECKING:
    from manyheads.data.examples import Examples
    from manyheads.training.task import Task

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
    intervals: the 95% intervals of metrics, over the rows, for labelled data.
    reading: what was read as what, for labelled data.
    notes: what was cut or left out of labelled data.
    """

    task: str
    metrics: dict[str, float]
    examples: int
    total: int
    interrupted: bool
    intervals: dict[str, Interval] = field(default_factory=dict)
    reading: str = ""
    notes: list[str] = field(default_factory=list)


def evaluate(
    folder: Folder | nn.Module | Loaded,
    data: str | Labelled | None = None,
    *,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    beams: int | None = None,
    batch_tokens: int = 4096,
    device: str | None = None,
    progress: Progress = no_progress,
    **opening: Any,
) -> Evaluation:
    """The metrics of a model on its validation data or on yours: what ``manyheads evaluate`` prints.

    A model that `train` wrote is measured on what its task reads. A model of transformers with a task head is
    measured on rows with labels, by the metrics of its task with 95% intervals: see `labelled`.

    Of ``data``, the test part is read if there is one; of the data that the model was trained on, the part
    that was held out. Files outside the folder are read only if you name them.

    Parameters
    ----------
    folder: a folder that `train` wrote, or one in which `save` wrote a pruned model of it; or any model that
        `open_model` opens or has opened, or a model itself with what `labelled` returned as ``data``.
    data: what to measure on, as the task reads it. Default: the examples that were held out in training.
        For a model with a task head: a file with labels, the name of a dataset, or what `labelled` returned.
    text, label, split, limit, max_length: as for `labelled`.
    beams: beam width for tasks that generate text (translation, speech).
    batch_tokens: tokens that run through the model at once.
    device: such as ``cpu`` or ``cuda:1``. Default: the accelerator, if there is one.
    progress: called with the number of examples that are done.
    opening: ``dtype``, ``device_map``, ``attention`` and ``revision`` of a model that `train` did not write,
        as for `open_model`.

    Returns
    -------
    Evaluation
        ``metrics`` by name, and how many examples they are of. Ctrl-C ends the evaluation after the current
        batch, with the metrics of the examples so far.

    Examples
    --------
    >>> import tempfile
    >>> import manyheads as mh
    >>> task = mh.tasks.find("language")(context=16, d_model=8, heads=2, layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = mh.train(task, out=folder, steps=3, batch_tokens=64, evaluate_examples=2, watch_every=0)
    ...     result = mh.evaluate(folder)
    >>> sorted(result.metrics), result.examples == result.total
    (['bits_per_byte', 'loss', 'perplexity'], True)

    See Also
    --------
    train : train the model of a task.
    labelled : rows with labels for a model with a task head.
    predict : the model's output for your own input.

    References
    ----------
    Post 2018, A call for clarity in reporting BLEU scores (translation).
    Popović 2015, chrF: character n-gram F-score for automatic MT evaluation (picturebook).
    """
    options: Keywords = {"text": text, "label": label, "split": split}
    options |= {"limit": limit, "max_length": max_length}
    if isinstance(data, Labelled):
        model = folder if isinstance(folder, nn.Module) else _opened(folder, device, opening).model
        return _on_labels(model, data, progress)
    if isinstance(folder, nn.Module):
        raise ValueError("data: a model itself needs what labelled(data, model, tokenizer) returns")
    if isinstance(folder, Loaded) or not _is_trained(folder):
        if data is None:
            raise ValueError(
                f"data: {_name(folder)} was not trained by manyheads, which would have kept its examples; "
                "give a file with labels, or the name of a dataset"
            )
        loaded = _opened(folder, device, opening)
        return _on_labels(
            loaded.model, labelled(data, loaded, batch_tokens=batch_tokens, **options), progress
        )
    if unused := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            f"{unused[0]}: {folder} was trained by manyheads, whose task knows how its data is read; "
            "leave it out"
        )
    if unused := [name for name, value in opening.items() if value is not None]:
        raise ValueError(
            f"{unused[0].replace('_', '-')}: {folder} was trained by manyheads, and is evaluated as it was "
            "trained; leave it out"
        )
    task, model = load(folder, device)
    if beams is not None:
        if not hasattr(task, "beams"):
            raise ValueError(
                f"beams: got {beams} for {task.name}, which does not search; leave the option out"
            )
        task.beams = beams
    examples = held_out(folder, task) if data is None else read_data(folder, task, data)
    counted = 0

    def count(stage: str, done: float, total: float | None) -> None:
        nonlocal counted
        counted = int(done)
        progress(stage, done, total)

    with interruptible():
        metrics = measure(task, model, examples, batch_tokens=batch_tokens, progress=count, partly=True)
        stopped = interrupted()
    return Evaluation(task.name, metrics, counted if stopped else len(examples), len(examples), stopped)


def _opened(model: Folder | Loaded, device: str | None, how: Mapping[str, Any]) -> Loaded:
    """A model by its name, unless it is open already."""
    return model if isinstance(model, Loaded) else open_model(str(model), head=True, device=device, **how)


def _name(model: Folder | Loaded) -> str:
    return model.name if isinstance(model, Loaded) else str(model)


def _on_labels(model: nn.Module, data: Labelled, progress: Progress) -> Evaluation:
    with interruptible():
        measured = data.evaluate(model, progress)
        stopped = interrupted()
    return Evaluation(
        data.task.kind,
        {name: one.mean for name, one in measured.metrics.items()},
        measured.rows,
        len(data.examples),
        stopped,
        measured.metrics,
        data.reading,
        data.notes,
    )


def _is_trained(folder: Folder) -> bool:
    """Whether a folder has the task of a model that manyheads trained."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        return False
    description = described.read(path)
    return description is not None and "task" in description


def predict(
    folder: Folder, inputs: Sequence[str], *, device: str | None = None, **options: object
) -> list[str]:
    """The output of a trained model for each input: what ``manyheads predict`` prints.

    Parameters
    ----------
    folder: a folder that `train` wrote, or one in which `save` wrote a pruned model of it.
    inputs: texts, sequences of bases, or paths of files, as the task reads them.
    device: such as ``cpu`` or ``cuda:1``. Default: the accelerator, if there is one.
    options: those of the task's ``predict``: ``new_tokens``, ``temperature`` and ``seed`` for language;
        ``beams`` for translation and speech; ``language`` for picturebook.

    Examples
    --------
    >>> import tempfile
    >>> import manyheads as mh
    >>> task = mh.tasks.find("language")(context=16, d_model=8, heads=2, layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = mh.train(task, out=folder, steps=3, batch_tokens=64, evaluate_examples=2, watch_every=0)
    ...     texts = mh.predict(folder, ["The function"], new_tokens=5)
    >>> len(texts), texts[0].startswith("The function")
    (1, True)

    See Also
    --------
    evaluate : the metrics of the model.
    generate : continue token ids with a `Decoder` or a `Seq2Seq`.

    References
    ----------
    Graves et al. 2006, Connectionist temporal classification (speech).
    Wu et al. 2016, Google's neural machine translation system (beam search).
    """
    if isinstance(inputs, str) or not inputs:
        raise ValueError(f"inputs: got {inputs!r}; expected a list of at least one text or path")
    task, model = load(folder, device)
    accepted = [
        name for name in inspect.signature(task.predict).parameters if name not in ("model", "inputs")
    ]
    if unknown := [name for name in options if name not in accepted]:
        expected = ", ".join(accepted) or "none"
        raise ValueError(f"{unknown[0]}: not an option of {task.name}; expected one of its own: {expected}")
    return task.predict(model, list(inputs), **options)


def load(folder: Folder, device: str | None = None) -> tuple[Task, nn.Module]:
    """The task and the model of a trained folder, on a device (`choose_device`), in eval mode."""
    return restore(folder), load_model(folder).to(choose_device(device))


def build(description: Mapping[str, object]) -> Task:
    """The task that a config.json describes: its name and its options, whose types are checked.

    >>> build({"name": "language", "heads": 2}).heads
    2
    """
    options = dict(description)
    kind: Any = find(str(options.pop("name")))  # a dataclass, which the protocol cannot say
    if unknown := sorted(set(options) - {field.name for field in fields(kind)}):
        raise ValueError(f"{unknown[0]:.60} is not an option of this manyheads; update it")
    check_fields(options, get_type_hints(kind), "task")
    task: Task = kind(**options)
    return task


def restore(folder: Folder) -> Task:
    """The task of a trained model, from the folder that train or save wrote."""
    folder = Path(folder)
    config = read_config(folder)
    with in_one_sentence(f"{folder}: its config.json is damaged; get the folder again"):
        task = build(config["task"])
        task.restore(folder)
        model = json.loads(json.dumps(task.describe()))
        pairs = [("class", model["class"], config["class"])]
        pairs += [
            (name, value, config["options"].get(name, value)) for name, value in model["options"].items()
        ]
        for name, of_task, of_model in pairs:
            if of_task != of_model:
                raise ValueError(f"{name} is {of_task!r:.60} for the task and {of_model!r:.60} for the model")
    return task


def held_out(folder: Folder, task: Task, data: str | None = None) -> Examples:
    """The validation examples of the run in a folder: what its training did not learn from.

    Parameters
    ----------
    folder, task: the run.
    data: what it was trained on, unless that is embedded or inside the folder; see `may_read`.
    """
    training = read_config(Path(folder))["training"]
    for path in (training["valid"], training["data"]):
        if path is not None and not _same(path, data) and not may_read(path, folder):
            raise UnreadDataError(
                f"MODEL: {folder} names {path} as its data, which is not in the folder; it may be a private "
                "file of yours, so it is read only if you name it",
                path,
            )
    return task.open(training["data"], training["valid"]).valid


def read_data(folder: Folder, task: Task, data: str) -> Examples:
    """Examples to measure on, in data that a person names.

    The test part if there is one; else, of the data that the model was trained on, what was held out; else
    all.
    """
    training = read_config(Path(folder))["training"]
    learned = training["data"] is not None and training["valid"] is None and _same(training["data"], data)
    return held_out(folder, task, data) if learned and not task.has_test(data) else task.read(data)


def may_read(path: str, folder: Folder) -> bool:
    """Whether a trained folder may name this path itself: if it lies inside, and no link there leads out.

    A folder may come from another person, and may name private files of yours. Anything outside of the
    folder is read only if the person who runs the command names it.

    >>> may_read("/etc/passwd", "out/language"), may_read("out/language/../../private.txt", "out/language")
    (False, False)
    """
    home = Path(folder).expanduser().resolve()
    if not Path(path).expanduser().resolve().is_relative_to(home):
        return False
    return all(inside.resolve().is_relative_to(home) for inside in home.rglob("*"))


def _same(path: str, other: str | None) -> bool:
    return other is not None and Path(path).expanduser().resolve() == Path(other).expanduser().resolve()
