"""Train a task by its name, resume the run of a folder, sweep: what the command line does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from manyheads import tasks, training
from manyheads.common.json_files import in_one_sentence
from manyheads.common.types import Keywords
from manyheads.tasks.architecture import Architecture
from manyheads.training.loop import Callback, Result
from manyheads.training.options import Options
from manyheads.training.run_folder import Run, read_config
from manyheads.training.sweep_plan import VARIED
from manyheads.training.train import train

if TYPE_CHECKING:
    from manyheads.training.sweep_result import SweepResult


def train_task(
    name: str,
    options: Mapping[str, object],
    *,
    out: Path,
    data: str | None = None,
    valid: str | None = None,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    trackers: Sequence[str] = (),
) -> Result:
    """Train the task of that name.

    Parameters
    ----------
    name: such as ``language``; `manyheads.tasks.TASKS` has them all.
    options: of the task and of training together, as the command line has them.
    out, data, valid, callbacks, trackers: as for `train`.
    resume: continue the run in ``out``; what ``options`` does not name is as that run began.

    See Also
    --------
    find: the class of a task.
    train: trains a task that you have in hand.

    References
    ----------
    Loshchilov and Hutter 2019, Decoupled weight decay regularization (the optimizer, AdamW).

    Examples
    --------
    >>> import tempfile
    >>> sizes = {"context": 16, "d_model": 8, "heads": 2, "layers": 1}
    >>> steps = {"steps": 3, "batch_tokens": 64, "evaluate_examples": 2, "watch_every": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train_task("language", sizes | steps, out=Path(folder))
    >>> result.step
    3
    """
    described, of_training = split_options(name, options)
    if resume and Run(out).config.exists():
        config = _recorded(out, name, {"data": data, "valid": valid})
        described, recorded = config["task"] | described, config["training"]
        data, valid = data or recorded["data"], valid or recorded["valid"]
        of_training = split_options(name, recorded)[1] | of_training
    task = tasks.build(described)
    return train(
        task, data, out=out, valid=valid, resume=resume, callbacks=callbacks, trackers=trackers, **of_training
    )


def sweep_task(name: str, options: Mapping[str, object], **settings: Any) -> SweepResult:
    """Sweep over the task of that name: what ``manyheads sweep`` does.

    Parameters
    ----------
    name, options: as for `train_task`.
    settings: those of `sweep`; whole numbers are texts, such as ``"1,2,4"``.
    """
    described, of_training = split_options(name, options)
    lists = {
        option: _numbers(text, option) for option, text in settings.items() if option in (*VARIED, "seeds")
    }
    return training.sweep.sweep(tasks.build(described), **(settings | lists), **of_training)


def _numbers(text: str, option: str) -> int | list[int]:
    """A whole number, or several, separated by commas.

    >>> _numbers("3", "seeds"), _numbers("1, 2,4", "heads")
    (3, [1, 2, 4])
    """
    try:
        listed = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: got {text!r}; expected whole numbers, as in 1,2,4") from None
    return listed if "," in text else listed[0]


class TaskOption(NamedTuple):
    """An option of a task or of its training; ``panel`` is what it is about: Task, Model or Training."""

    name: str
    kind: Any
    help: str
    default: object
    panel: str


def task_options(name: str) -> list[TaskOption]:
    """All options that `train_task` takes for a task: the fields of its class, and those of training.

    >>> options = {option.name: option for option in task_options("language")}
    >>> [options[name].panel for name in ("context", "heads", "steps")]
    ['Task', 'Model', 'Training']
    """
    task: Any = tasks.find(name)
    of_model = {field.name for field in fields(Architecture)}
    listed = []
    sources: list[tuple[Any, dict[str, object]]] = [(task, {}), (Options, task.training)]
    for kind, defaults in sources:
        hints = get_type_hints(kind)
        for field in fields(kind):
            panel = "Training" if kind is Options else "Model" if field.name in of_model else "Task"
            about, default = field.metadata["help"], defaults.get(field.name, field.default)
            listed.append(TaskOption(field.name, hints[field.name], about, default, panel))
    return listed


def split_options(name: str, options: Mapping[str, object]) -> tuple[Keywords, Keywords]:
    """The description of a task, as `tasks.build` takes it, and the options of training.

    >>> split_options("language", {"layers": 2, "steps": 50})
    ({'name': 'language', 'layers': 2}, {'steps': 50})
    """
    names = {field.name for field in fields(Options)}
    of_training = {key: value for key, value in options.items() if key in names}
    return {"name": name} | {key: value for key, value in options.items() if key not in names}, of_training


def _recorded(folder: Path, name: str, paths: Mapping[str, str | None]) -> Keywords:
    """The config.json of a run of this task. It may name data outside the folder: only a person may."""
    config = read_config(folder)
    if config["task"]["name"] != name:
        raise ValueError(f"out: {folder} holds a run of {config['task']['name']}; expected one of {name}")
    with in_one_sentence(f"{folder}: its config.json is damaged; get the folder again"):
        tasks.build(config["task"])
    for option, path in paths.items():
        recorded = config["training"][option]
        if path is None and recorded is not None and not tasks.may_read(recorded, folder):
            raise ValueError(
                f"{option}: the run in {folder} names {recorded}, which is not in the folder; name it "
                f"yourself if it is to be read: --{option} {recorded}"
            )
    return config
