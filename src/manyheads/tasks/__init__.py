"""Real work for heads: one file a task, each with its data, model, loss, metric and prediction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from manyheads.common.errors import UnreadDataError
from manyheads.common.registry import register

if TYPE_CHECKING:
    from torch import nn

    from manyheads.data.examples import Examples
    from manyheads.training.task import Task

# How the folder of a trained model is opened, and which examples its training held out.
register("tasks.restore", "manyheads.tasks:restore")
register("tasks.held_out", "manyheads.tasks:held_out")

# The models of the tasks, by the names that config.json has for them: modules may move, these names stay.
register("language.next", "manyheads.nn.transformers:Decoder")
register("language.masked", "manyheads.tasks.language:MaskedLanguage")
register("images.class", "manyheads.tasks.images:PictureClassifier")
register("series.forecast", "manyheads.tasks.series:Forecaster")
register("dna.class", "manyheads.tasks.dna:SequenceClassifier")
register("translation.seq2seq", "manyheads.nn.transformers:Seq2Seq")
register("speech.class", "manyheads.tasks.speech.models:Classifier")
register("speech.ctc", "manyheads.tasks.speech.models:Speller")
register("speech.decoder", "manyheads.tasks.speech.models:Transcriber")
register("picturebook.cross", "manyheads.tasks.picturebook.models:Describer")
register("picturebook.single", "manyheads.tasks.picturebook.models:Stream")

# Where each task lives, and what it is, for people who have not loaded torch yet.
TASKS = {
    "language": ("manyheads.tasks.language:Language", "Learn a text: the next token, or hidden ones."),
    "images": ("manyheads.tasks.images:Images", "What a picture shows."),
    "series": ("manyheads.tasks.series:Series", "How columns of numbers go on."),
    "dna": ("manyheads.tasks.dna:DNA", "The class of a stretch of DNA."),
    "translation": (
        "manyheads.tasks.translation.task:Translation",
        "Sentences from one language to another.",
    ),
    "speech": (
        "manyheads.tasks.speech.task:Speech",
        "What is said in a recording: a word, or a string of words.",
    ),
    "picturebook": (
        "manyheads.tasks.picturebook.task:Picturebook",
        "Captions of pictures, in several languages.",
    ),
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


def build(description: Mapping[str, Any]) -> Task:
    """The task that a config.json describes: its name and its options, whose types are checked.

    >>> build({"name": "language", "heads": 2}).heads
    2
    """
    from manyheads.common.json_files import check_fields

    options = dict(description)
    kind: Any = find(options.pop("name"))
    if unknown := sorted(set(options) - {field.name for field in fields(kind)}):
        raise ValueError(f"{unknown[0]:.60} is no option of this manyheads; update it")
    check_fields(options, get_type_hints(kind), "task")
    task: Task = kind(**options)
    return task


def restore(folder: str | Path) -> Task:
    """The task of a trained model, from the folder that train or save wrote."""
    from manyheads.common.json_files import in_one_sentence
    from manyheads.training.run_folder import read_config

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
        for name, here, there in pairs:
            if here != there:
                raise ValueError(f"{name} is {here!r:.60} for the task and {there!r:.60} for the model")
    return task


def held_out(folder: str | Path, task: Task, data: str | None = None) -> Examples:
    """What training did not learn from: the validation examples of the run in this folder.

    Parameters
    ----------
    folder, task: the run.
    data: what it was trained on, unless that is embedded or inside the folder; see `may_read`.
    """
    from manyheads.training.run_folder import read_config

    training = read_config(Path(folder))["training"]
    for path in (training["valid"], training["data"]):
        if path is not None and not _same(path, data) and not may_read(path, folder):
            raise UnreadDataError(
                f"MODEL: {folder} names {path} as its data, which is not in the folder; it may be a private "
                "file of yours, so it is read only if you name it",
                path,
            )
    return task.open(training["data"], training["valid"]).valid


def read_data(folder: str | Path, task: Task, data: str) -> Examples:
    """Examples to measure on, in data that a person names.

    The part for testing if there is one; else, of the data that the model learned from, what was held out;
    else all.
    """
    from manyheads.training.run_folder import read_config

    training = read_config(Path(folder))["training"]
    learned = training["data"] is not None and training["valid"] is None and _same(training["data"], data)
    return held_out(folder, task, data) if learned and not task.has_test(data) else task.read(data)


def may_read(path: str, folder: str | Path) -> bool:
    """Whether a trained folder may name this path itself: if it lies inside, and no link there leads out.

    A folder may come from somebody else, and what it names may be private: what is read elsewhere is what the
    person who runs the command names.

    >>> may_read("/etc/passwd", "out/language"), may_read("out/language/../../private.txt", "out/language")
    (False, False)
    """
    home = Path(folder).expanduser().resolve()
    if not Path(path).expanduser().resolve().is_relative_to(home):
        return False
    return all(inside.resolve().is_relative_to(home) for inside in home.rglob("*"))


def _same(path: str, other: str | None) -> bool:
    return other is not None and Path(path).expanduser().resolve() == Path(other).expanduser().resolve()


def load(folder: str | Path, device: str | None = None) -> tuple[Task, nn.Module]:
    """A trained model with its task, ready to measure and to predict, on that device (`choose_device`)."""
    from manyheads.common.devices import choose_device
    from manyheads.models.folder import load as load_model

    task = restore(folder)
    return task, load_model(folder).to(choose_device(device))
