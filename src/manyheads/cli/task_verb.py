"""A verb with a command for every task; the options of a task are the fields of its class."""

from inspect import Signature, cleandoc
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand

import manyheads as mh
from manyheads.cli.options import Json, Out, command
from manyheads.common.commands import Verb, built_command, late_commands, optional, optional_fields, unwrapped
from manyheads.common.console import loading
from manyheads.tasks import available


def task_verb(run: Verb, options: type, out: Path) -> typer.Typer:
    """A verb with a command for every task.

    ``run`` gets the name of the task, the options of task and training that were passed, and by name those of
    ``options``, a dataclass, which replace options of the task, with ``json`` and ``out``: by default, the
    folder of the task in ``out``.
    """
    return late_commands(
        run.__name__,
        unwrapped(run.__doc__ or ""),
        lambda: {name: about for name, (_, about) in available().items()},
        lambda name: _command(name, run, options, out / name),
    )


def _command(name: str, run: Verb, options: type, out: Path) -> TyperCommand:
    """The command of a task: the options of the run, those of the task, and those of training."""
    json = optional("json", *get_args(Json))
    of_run = [*optional_fields(options), json, optional("out", Path, get_args(Out)[1], out)]
    run_names = {each.name for each in of_run}
    run_names |= {"seed"} if "seeds" in run_names else set()
    with loading("torch"):
        of_task = [optional(*each) for each in mh.tasks.task_options(name) if each.name not in run_names]

    def verb(**passed: Any) -> str | None:
        values = {key: value for key, value in passed.items() if value is not None}
        settings = {each.name: values.pop(each.name) for each in of_run if each.name in values}
        return run(name, values, **{"out": out, **settings})

    verb.__signature__ = Signature([*of_run, *of_task])  # type: ignore[attr-defined]
    about = cleandoc(mh.tasks.find(name).__doc__ or "").split("Examples\n")[0].replace("`", "").strip()
    paragraphs = [" ".join(part.split()) for part in about.split("\n\n")]
    last = cleandoc(run.__doc__ or "").split("[bold]")[0].strip().rpartition("\n\n")[2]  # before the examples
    return built_command(name, command(verb), "\n\n".join([*paragraphs, last]))
