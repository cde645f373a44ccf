"""``manyheads train TASK``: a command for every task; the options of a task are the fields of its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from manyheads.cli.options import SETTINGS, command
from manyheads.common.processes import rank
from manyheads.tasks import TASKS

EPILOG = """Ctrl-C keeps a checkpoint, and --resume continues from it, to the bit, as it does after a crash.
Several processes share the work with `torchrun --nproc-per-node 2 -m manyheads train TASK ...`."""


class _Tasks(TyperGroup):
    """Commands that are built when they are called: their options come with the task, and that with torch."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(TASKS)

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
        return _command(cmd_name, lambda: None, TASKS[cmd_name][1]) if cmd_name in TASKS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, _of_task(name) if name in TASKS else listed, rest


train = typer.Typer(
    name="train",
    cls=_Tasks,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=f"""Train a transformer on a task, on your data or on an embedded example of it.

The folder it writes is a model: evaluate, predict, inspect, prune and the others take it.

{EPILOG}

[bold]Examples[/bold]

  manyheads train language --data book.txt --heads 8
  manyheads train translation --data corpus/train --source en --target de
""",
)


def run(
    task: str,
    options: Mapping[str, object],
    *,
    data: str | None = None,
    valid: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    tracker: str = "tensorboard",
    json: bool = False,
) -> str | None:
    """Train, and print what came of it."""
    with Console(stderr=True).status("Loading torch"):
        from manyheads.tasks import find
        from manyheads.tasks.train import train_task
        from manyheads.view.terminal.training import HEADS, how_to_resume, print_training, training_bar
    with training_bar(Console(stderr=True, quiet=json or rank() > 0), find(task).metric) as show:
        result = train_task(
            task,
            options,
            out=out or Path("out") / task,
            data=data,
            valid=valid,
            resume=resume,
            callbacks=[show],
            trackers=[] if tracker == "none" else [tracker],
        )
    if rank() == 0:
        if result.dynamic is not None:
            result.dynamic.draw(result.out / HEADS)
        print_training(result, data, valid, as_json=json)
    return how_to_resume(result, task, data, valid) if result.ended == "interrupted" else None


def _of_task(name: str) -> TyperCommand:
    """The command of a task: its options, those of training, and those of the run."""
    from manyheads.tasks import find
    from manyheads.tasks.architecture import Architecture
    from manyheads.training.options import Options

    task: Any = find(name)
    of_run = [
        _parameter("data", str, "What to learn from; an embedded example by default.", None),
        _parameter("valid", str, "What to validate on; by default, a part of the data is held out.", None),
        _parameter("out", Path, "The folder of the run.", Path("out") / name),
        _parameter("resume", bool, "Continue the run in that folder.", False),
        _parameter("tracker", str, "Where curves go (a tracker of Accelerate), or none.", "tensorboard"),
        _parameter("json", bool, "Print JSON for machines.", False),
    ]
    of_model = {field.name for field in fields(Architecture)}
    parameters = [*of_run]
    sources: list[tuple[Any, dict[str, object]]] = [(task, {}), (Options, task.training)]
    for kind, defaults in sources:
        hints = get_type_hints(kind)
        for field in fields(kind):
            panel = "Training" if kind is Options else "Model" if field.name in of_model else "Task"
            option, default = field.name, defaults.get(field.name, field.default)
            parameters.append(_parameter(option, hints[option], field.metadata["help"], default, panel))

    def verb(**options: Any) -> str | None:
        passed = {key: value for key, value in options.items() if value is not None}
        settings = {each.name: passed.pop(each.name) for each in of_run if each.name in passed}
        return run(name, passed, **settings)

    verb.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    about = cleandoc(task.__doc__ or "").split("Examples\n")[0].replace("`", "").strip()
    paragraphs = [" ".join(part.split()) for part in about.split("\n\n")]
    return _command(name, command(verb), "\n\n".join([*paragraphs, EPILOG]))


def _parameter(name: str, hint: Any, help: str, default: object, panel: str | None = None) -> Parameter:
    """An option that is None unless it is passed; its help says what holds then."""
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    if default is not None and default is not False:
        help = f"{help} [dim]({default})[/dim]"
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag, help=help, show_default=False, rich_help_panel=panel)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _command(name: str, function: Callable[..., None], help: str) -> TyperCommand:
    app = typer.Typer(**SETTINGS)
    app.command(name, help=help)(function)
    built: TyperCommand = typer.main.get_command(app)  # type: ignore[assignment]
    return built
