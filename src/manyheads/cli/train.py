"""``manyheads train TASK``: a command for every task; the options of a task are the fields of its class."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

import manyheads as mh
from manyheads.cli.options import SETTINGS, Verb, command, loading, option, unwrapped
from manyheads.common.processes import rank
from manyheads.tasks import available
from manyheads.view import terminal


def task_option(name: str, hint: Any, help: str, default: object = None, panel: str = "") -> Parameter:
    """An option that is None unless it is passed; its help says what holds then."""
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    if default is not None and default is not False and default != "":
        help = f"{help} [dim]({default})[/dim]"
    return option(name, None, Annotated[kind | None, help, panel or None])


OF_RUN = [
    task_option("data", str, "What to learn from; an embedded example by default."),
    task_option("valid", str, "What to validate on; by default, a part of the data is held out."),
    task_option("resume", bool, "Continue the run in that folder.", False),
    task_option("tracker", str, "Where curves go (a tracker of Accelerate), or none.", "tensorboard"),
    task_option("json", bool, "Print JSON for machines.", False),
]


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
    with terminal.training.training_bar(mh.tasks.find(task).metric, hidden=json or rank() > 0) as show:
        trackers = [] if tracker == "none" else [tracker]
        result = mh.tasks.train_task(task, options, out=out, callbacks=[show], trackers=trackers, **settings)
    files = settings.get("data"), settings.get("valid")
    if rank() == 0:
        terminal.training.print_training(result, *files, as_json=json)
    return terminal.training.how_to_resume(result, task, *files)


def task_verb(run: Verb, of_run: Sequence[Parameter], out: Path) -> typer.Typer:
    """A verb with a command for every task.

    ``run`` gets the name of the task, the options of task and training that were passed, and by name those of
    ``of_run``, which replace options of the task, and ``out``: by default, the folder of the task in ``out``.
    """

    class Tasks(TyperGroup):
        """Commands that are built when they are called: their options need the task, which needs torch."""

        def list_commands(self, ctx: object) -> list[str]:
            return list(available())

        def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
            tasks = available()
            return _command(cmd_name, lambda: None, tasks[cmd_name][1]) if cmd_name in tasks else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            task, listed, rest = super().resolve_command(ctx, args)
            return task, _of_task(task, run, of_run, out) if task in available() else listed, rest

    help = unwrapped(run.__doc__ or "")
    return typer.Typer(name=run.__name__, cls=Tasks, no_args_is_help=True, help=help, **SETTINGS)


def _of_task(name: str, run: Verb, of_run: Sequence[Parameter], out: Path) -> TyperCommand:
    """The command of a task: the options of the run, those of the task, and those of training."""
    of_run = [*of_run, task_option("out", Path, "The folder for the results.", out / name)]
    taken = {each.name for each in of_run}
    taken |= {"seed"} if "seeds" in taken else set()
    with loading("torch"):
        of_task = [task_option(*each) for each in mh.tasks.task_options(name) if each.name not in taken]

    def verb(**options: Any) -> str | None:
        chosen = {key: value for key, value in options.items() if value is not None}
        settings = {each.name: chosen.pop(each.name) for each in of_run if each.name in chosen}
        return run(name, chosen, **{"out": out / name, **settings})

    verb.__signature__ = Signature([*of_run, *of_task])  # type: ignore[attr-defined]
    about = cleandoc(mh.tasks.find(name).__doc__ or "").split("Examples\n")[0].replace("`", "").strip()
    paragraphs = [" ".join(part.split()) for part in about.split("\n\n")]
    how = cleandoc(run.__doc__ or "").split("[bold]")[0].strip().rpartition("\n\n")[2]  # before the examples
    return _command(name, command(verb), "\n\n".join([*paragraphs, how]))


def _command(name: str, function: Callable[..., None], help: str) -> TyperCommand:
    app = typer.Typer(**SETTINGS)
    app.command(name, help=help)(function)
    built: TyperCommand = typer.main.get_command(app)  # type: ignore[assignment]
    return built
