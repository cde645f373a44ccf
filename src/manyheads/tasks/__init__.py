"""Real work for heads: one file per task, each with its data, model, loss, metric and prediction.

`TASKS` lists them by name, and `find` gives the class of one. Its fields are its options: of the data and of
the model. `manyheads.train` trains it.

>>> import manyheads as mh
>>> sorted(mh.tasks.TASKS)
['dna', 'images', 'language', 'picturebook', 'series', 'speech', 'translation']
>>> task = mh.tasks.find("language")(context=32, heads=2)
>>> task.context, task.metric
(32, 'loss')
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from manyheads.common import plugins
from manyheads.common.errors import describe_error
from manyheads.common.lazy_names import attributes
from manyheads.common.registry import register

if TYPE_CHECKING:
    from manyheads.tasks.dna import attention_panels as attention_panels
    from manyheads.tasks.train import sweep_task as sweep_task
    from manyheads.tasks.train import task_options as task_options
    from manyheads.tasks.train import train_task as train_task
    from manyheads.tasks.trained import build as build
    from manyheads.tasks.trained import held_out as held_out
    from manyheads.tasks.trained import load as load
    from manyheads.tasks.trained import may_read as may_read
    from manyheads.tasks.trained import read_data as read_data
    from manyheads.tasks.trained import restore as restore
    from manyheads.training.task import Task
else:  # these need torch, which listing the tasks does not
    _NAMES = {
        "manyheads.tasks.dna": ("attention_panels",),
        "manyheads.tasks.train": ("sweep_task", "task_options", "train_task"),
        "manyheads.tasks.trained": ("build", "held_out", "load", "may_read", "read_data", "restore"),
    }
    __getattr__ = attributes(__name__, {name: home for home, names in _NAMES.items() for name in names})

# How the folder of a trained model is opened, and which examples its training held out.
register("tasks.restore", "manyheads.tasks.trained:restore")
register("tasks.held_out", "manyheads.tasks.trained:held_out")

# The models of the tasks, by the names that config.json has for them: modules may move, these names stay.
register("language.next", "manyheads.nn.transformers:Decoder")
register("language.masked", "manyheads.tasks.language:MaskedLanguage")
register("images.class", "manyheads.tasks.images:ImageClassifier")
register("series.forecast", "manyheads.tasks.series:Forecaster")
register("dna.class", "manyheads.tasks.dna:SequenceClassifier")
register("translation.seq2seq", "manyheads.nn.transformers:Seq2Seq")
register("speech.class", "manyheads.tasks.speech.models:Classifier")
register("speech.ctc", "manyheads.tasks.speech.models:Speller")
register("speech.decoder", "manyheads.tasks.speech.models:Transcriber")
register("picturebook.cross", "manyheads.tasks.picturebook.models:Describer")
register("picturebook.single", "manyheads.tasks.picturebook.models:Stream")

# Where the class of each task is, and what the task does; both without loading torch.
TASKS = {
    "language": ("manyheads.tasks.language:Language", "Language modelling: the next token, or masked ones."),
    "images": ("manyheads.tasks.images:Images", "Image classification."),
    "series": ("manyheads.tasks.series:Series", "Time series forecasting."),
    "dna": ("manyheads.tasks.dna:DNA", "Classification of DNA sequences."),
    "translation": ("manyheads.tasks.translation:Translation", "Translation of sentences."),
    "speech": ("manyheads.tasks.speech.task:Speech", "Speech recognition: a word, or a string of words."),
    "picturebook": ("manyheads.tasks.picturebook.task:Picturebook", "Image captions in several languages."),
}


def available() -> dict[str, tuple[str, str]]:
    """All tasks by name, each with its class and what it does; nothing is imported.

    They are `TASKS`, and those of other packages, which name them as entry points ``manyheads.tasks``.

    See Also
    --------
    find: the class of a task.

    References
    ----------
    Python Packaging User Guide, Entry points specification.

    Examples
    --------
    >>> available()["images"]
    ('manyheads.tasks.images:Images', 'Image classification.')
    """
    others = {
        name: (where, f"{where}, a plugin.")
        for name, where in plugins.plugin_paths("manyheads.tasks").items()
    }
    return others | TASKS


def find(name: str) -> type[Task]:
    """The class of a task by its name; its fields are the task's options.

    See Also
    --------
    available: the names of all tasks.
    train_task: trains the task of a name.

    References
    ----------
    Python Packaging User Guide, Entry points specification: how other packages add tasks.

    Examples
    --------
    >>> find("language").__name__
    'Language'
    >>> find("chess")
    Traceback (most recent call last):
    ValueError: task: got 'chess'; expected one of language, images, series, dna, ...
    """
    tasks = available()
    if name not in tasks:
        raise ValueError(f"task: got {name!r}; expected one of {', '.join(tasks)}")
    module, _, attribute = tasks[name][0].partition(":")
    try:
        kind: type[Task] = getattr(import_module(module), attribute)
    except Exception as error:
        if name in TASKS:
            raise
        raise ValueError(
            f"task: the plugin {name} ({tasks[name][0]}) cannot be loaded: {describe_error(error)}; update "
            "or uninstall the package it comes with"
        ) from error
    return kind
