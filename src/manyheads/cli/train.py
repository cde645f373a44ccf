"""``manyheads train TASK``: a command for every task; the options of a task are the fields of its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from manyheads.cli.options import SETTINGS, command, option
from manyheads.common.processes import rank
from manyheads.tasks import TASKS


def task_option(
    name: str, hint: Any, help: str, default: object = None, panel: str | None = None
) -> Parameter:
    """An option that is None unless it is passed; its help says what holds then."""
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    if default is not None and default is not False and default != "":
        help = f"{help} [dim]({default})[/dim]"
    return option(name, None, Annotated[kind | None, help, panel])


OF_RUN = [
    task_option("data", str, "What to learn from; an embedded example by default."),
    task_option("valid", str, "What to validate on; by default, a part of the data is held out."),
    task_option("resume", bool, "Continue the run in that folder.", False),
    task_option("tracker", str, "Where curves go (a tracker of Accelerate), or none.", "tensorboard"),
    task_option("json", bool, "Print JSON for machines.", False),
]


def task_verb(
    name: str, run: Callable[..., str | None], help: str, of_run: Sequence[Parameter], out: Path = Path("out")
) -> typer.Typer:
    """A verb with a command for every task.

    ``run`` gets the name of the task, the options of task and training that were passed, and those of
    ``of_run`` by name; these replace options of the task. ``out`` has the folders of the tasks by default.
    """

    class Tasks(TyperGroup):
        """Commands that are built when they are called: their options need the task, which needs torch."""

        def list_commands(self, ctx: object) -> list[str]:
            return list(TASKS)

        def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
            return _command(cmd_name, lambda: None, TASKS[cmd_name][1]) if cmd_name in TASKS else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            task, listed, rest = super().resolve_command(ctx, args)
            folder = task_option("out", Path, "The folder for the results.", out / str(task))
            return task, _of_task(task, run, [*of_run, folder], help) if task in TASKS else listed, rest

    return typer.Typer(name=name, cls=Tasks, no_args_is_help=True, rich_markup_mode="rich", help=help)


def _of_task(name: str, run: Callable[..., str | None], of_run: list[Parameter], help: str) -> TyperCommand:
    """The command of a task: the options of the run, those of the task, and those of training."""
    from manyheads.tasks import find
    from manyheads.tasks.architecture import Architecture
    from manyheads.training.options import Options

    task: Any = find(name)
    of_model = {field.name for field in fields(Architecture)}
    taken = {each.name for each in of_run}
    taken |= {"seed"} if "seeds" in taken else set()
    parameters = [*of_run]
    sources: list[tuple[Any, dict[str, object]]] = [(task, {}), (Options, task.training)]
    for kind, defaults in sources:
        hints = get_type_hints(kind)
        for field in (field for field in fields(kind) if field.name not in taken):
            panel = "Training" if kind is Options else "Model" if field.name in of_model else "Task"
            about, default = field.metadata["help"], defaults.get(field.name, field.default)
            parameters.append(task_option(field.name, hints[field.name], about, default, panel))

    def verb(**options: Any) -> str | None:
        chosen = {key: value for key, value in options.items() if value is not None}
        settings = {each.name: chosen.pop(each.name) for each in of_run if each.name in chosen}
        return run(name, chosen, **settings)

    verb.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    about = cleandoc(task.__doc__ or "").split("Examples\n")[0].replace("`", "").strip()
    paragraphs = [" ".join(part.split()) for part in about.split("\n\n")]
    how = help.split("[bold]")[0].strip().rpartition("\n\n")[2]  # the last paragraph before the examples
    return _command(name, command(verb), "\n\n".join([*paragraphs, how]))


def _command(name: str, function: Callable[..., None], help: str) -> TyperCommand:
    app = typer.Typer(**SETTINGS)
    app.command(name, help=help)(function)
    built: TyperCommand = typer.main.get_command(app)  # type: ignore[assignment]
    return built


def run(
    task: str,
    options: Mapping[str, object],
    *,
    out: Path | None = None,
    tracker: str = "tensorboard",
    json: bool = False,
    **settings: Any,
) -> str | None:
    """Train, and print what came of it."""
    with Console(stderr=True).status("Loading torch"):
        from manyheads.tasks import find
        from manyheads.tasks.train import train_task
        from manyheads.view.terminal.training import HEADS, how_to_resume, print_training, training_bar
    with training_bar(Console(stderr=True, quiet=json or rank() > 0), find(task).metric) as show:
        trackers = [] if tracker == "none" else [tracker]
        out = out or Path("out") / task
        result = train_task(task, options, out=out, callbacks=[show], trackers=trackers, **settings)
    files = settings.get("data"), settings.get("valid")
    if rank() == 0:
        if result.dynamic is not None:
            result.dynamic.draw(result.out / HEADS)
        print_training(result, *files, as_json=json)
    return how_to_resume(result, task, *files) if result.ended == "interrupted" else None


train = task_verb(
    "train",
    run,
    """Train a transformer on a task, on your data or on an embedded example of it.

The folder it writes is a model: evaluate, predict, inspect, prune and the others take it.

Ctrl-C keeps a checkpoint, and --resume continues from it, to the bit, as it does after a crash.
Several processes share the work with `torchrun --nproc-per-node 2 -m manyheads train TASK ...`.

[bold]Examples[/bold]

  manyheads train language --data book.txt --heads 8
  manyheads train translation --data corpus/train --source en --target de
""",
    OF_RUN,
)
