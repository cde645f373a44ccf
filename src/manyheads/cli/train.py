"""``manyheads train TASK``: a command for every task, made of the fields that its options are."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import fields
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

from manyheads.common.interrupts import EXIT_CODE
from manyheads.tasks import TASKS

EPILOG = """Ctrl-C keeps a checkpoint and --resume goes on from it, to the bit, as it does after a crash.
Several processes share the work with `torchrun --nproc-per-node 2 -m manyheads train TASK ...`."""


class _Tasks(TyperGroup):
    """Commands that are made when they are called: their options come with the task, and that with torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(TASKS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in TASKS:
            return None
        return _command(cmd_name, lambda: None, TASKS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _of_task(name) if name in TASKS else command, rest


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


@train.callback()
def _train() -> None:
    pass


def run(
    name: str,
    given: dict[str, Any],
    *,
    data: str | None,
    valid: str | None,
    out: Path | None,
    resume: bool,
    tracker: str,
    machine: bool,
) -> int:
    """Train, tell, write; the exit code: 0, or 130 when Ctrl-C ended it."""
    errors = Console(stderr=True)
    with errors.status("Loading torch"):
        from manyheads import tasks
        from manyheads.common.json_files import in_one_sentence
        from manyheads.training.loop import train
        from manyheads.training.options import Options, with_options
        from manyheads.training.progress import progress
        from manyheads.training.run_folder import Run, read_config
    folder = out or Path("out") / name
    first = int(os.environ.get("RANK", 0)) == 0
    of_training = {field.name for field in fields(Options)}
    options = {key: value for key, value in given.items() if key in of_training}
    of_task = {key: value for key, value in given.items() if key not in of_training}
    kind: Any = tasks.find(name)
    if resume and Run(folder).config.exists():
        begun = read_config(folder)
        if begun["task"]["name"] != name:
            raise ValueError(f"out: {folder} holds a run of {begun['task']['name']}; expected one of {name}")
        with in_one_sentence(f"{folder}: its config.json is damaged; get the folder again"):
            tasks.build(begun["task"])
        task = tasks.build(begun["task"] | of_task)
        training = dict(begun["training"])
        for what, given_here in (("data", data), ("valid", valid)):
            path = training[what]
            if given_here is None and path is not None and not tasks.may_read(path, folder):
                raise ValueError(
                    f"{what}: the run in {folder} names {path}, which is not in the folder; name it yourself "
                    f"if it is to be read: --{what} {path}"
                )
        data, valid = data or training.pop("data"), valid or training.pop("valid")
        options = {key: value for key, value in training.items() if key in of_training} | options
    else:
        task = kind(**of_task)
    steps = with_options(dict(task.training), options).steps
    shown = Console(stderr=True, quiet=machine or not first)
    with progress(shown, steps, task.metric) as tell:
        result = train(
            task,
            data,
            out=folder,
            valid=valid,
            resume=resume,
            callbacks=[tell],
            trackers=[] if tracker == "none" else [tracker],
            **options,
        )
    if first:
        _tell(result, machine, name, data, valid)
    return EXIT_CODE if result.ended == "interrupted" else 0


def _tell(result: Any, machine: bool, task: str, data: str | None, valid: str | None) -> None:
    """What came of a run, with commands to go on: these name the data, which the folder may not."""
    if machine:
        numbers = {"step": result.step, "best_step": result.best_step, "ended": result.ended}
        told = {"out": str(result.out), **numbers, "metrics": result.metrics, "notes": result.notes}
        print(json.dumps(told), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"Data: {note}.")
    if result.ended == "interrupted":
        named = [
            part for name, path in (("--data", data), ("--valid", valid)) if path for part in (name, path)
        ]
        again = shlex.join(["manyheads", "train", task, "--resume", "--out", str(result.out), *named])
        console.print(f"Stopped after step {result.step:,}; go on with: {again}")
        return
    why = {"finished": "", "early": ", nothing got better any more"}[result.ended]
    console.print(f"{result.step:,} steps{why}. The best weights, of step {result.best_step:,}, reach")
    for metric, value in result.metrics.items():
        console.print(f"  {metric:<14} {value:.4f}")
    console.print(f"They are in {result.out}: try")
    measured = [] if data is None else ["--data", valid or data]
    for verb in ("predict", "evaluate", "inspect"):
        command = ["manyheads", verb, str(result.out), *(measured if verb != "predict" else [])]
        console.print(f"  {shlex.join(command)}")


def _of_task(name: str) -> Any:
    """The command of a task: its options, those of training, and a few of its own."""
    from manyheads.tasks import find
    from manyheads.tasks.architecture import Architecture
    from manyheads.training.options import Options

    kind: Any = find(name)
    common = {field.name for field in fields(Architecture)}
    parameters = [
        _parameter("data", str, "What to learn from; an embedded example without.", None, None),
        _parameter("valid", str, "What to measure on; without, a part of the data is held out.", None, None),
        _parameter("out", Path, "The folder of the run.", Path("out") / name, None),
        _parameter("resume", bool, "Go on with the run in that folder.", False, None),
        _parameter("tracker", str, "Where curves go (Accelerate's), or none.", "tensorboard", None),
        _parameter("json", bool, "Print JSON for machines.", False, None),
    ]  # fmt: skip
    sources: list[tuple[Any, dict[str, Any]]] = [(kind, {}), (Options, kind.training)]
    for options, defaults in sources:
        hints = get_type_hints(options)
        for field in fields(options):
            panel = "Training" if options is Options else "Model" if field.name in common else "Task"
            default = defaults.get(field.name, field.default)
            parameters.append(
                _parameter(field.name, hints[field.name], field.metadata["help"], default, panel)
            )
    own = {"data": None, "valid": None, "out": None, "resume": False, "tracker": "tensorboard", "json": False}

    def command(**given: Any) -> None:
        mine = {key: given.pop(key) for key in own}
        mine = {key: own[key] if value is None else value for key, value in mine.items()}
        chosen = {key: value for key, value in given.items() if value is not None}
        raise typer.Exit(run(name, chosen, machine=mine.pop("json"), **mine))

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    about = cleandoc(kind.__doc__ or "").split("Examples\n")[0].replace("``", "").replace("`", "")
    paragraphs = [" ".join(part.split()) for part in about.split("\n\n")]
    return _command(name, command, "\n\n".join([*paragraphs, EPILOG]))


def _parameter(name: str, hint: Any, help: str, default: Any, panel: str | None) -> Parameter:
    """An option that is None unless given; what then holds stands in its help."""
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    if default is not None and default is not False:
        help = f"{help} [dim]({default})[/dim]"
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag, help=help, show_default=False, rich_help_panel=panel)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _command(name: str, function: Any, help: str) -> Any:
    app = typer.Typer(
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(name, help=help)(function)
    return typer.main.get_command(app)
