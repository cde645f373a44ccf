"""The ``manyheads`` command. Each verb is a file here: its options, one call into the library, its output.

The library is loaded when a verb first uses a name of it (`mh.roles`, `mh.surgery.pruned_folder`,
`terminal.prune`: see common/lazy_names.py), so that ``--help`` answers at once.
"""

import io
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import manyheads
from manyheads.cli.cache import cache
from manyheads.cli.compare import compare
from manyheads.cli.demo import demo
from manyheads.cli.diversity import diversity
from manyheads.cli.evaluate import evaluate
from manyheads.cli.export import export, push
from manyheads.cli.importance import importance
from manyheads.cli.inspect import inspect
from manyheads.cli.merge import merge
from manyheads.cli.options import command
from manyheads.cli.predict import predict
from manyheads.cli.prune import prune
from manyheads.cli.roles import roles
from manyheads.cli.serve import serve
from manyheads.cli.study import study
from manyheads.cli.sweep import sweep
from manyheads.cli.task_verb import task_verb
from manyheads.cli.train import train
from manyheads.common.commands import LANGUAGE, SETTINGS, unwrapped
from manyheads.common.errors import FailedChangeError
from manyheads.common.extras import missing_extra
from manyheads.common.help_language import runnable
from manyheads.common.interrupts import EXIT_CODE, leave_at_once
from manyheads.common.language import choose_language
from manyheads.common.processes import share_one_heap
from manyheads.tasks.options import RunOptions, SweepOptions
from manyheads.view import terminal

app = typer.Typer(
    name="manyheads",
    invoke_without_command=True,
    **SETTINGS | {"add_completion": True},
    help=unwrapped("""Build, see, measure and cut the attention heads of any transformer.

A transformer looks at its input through many small attention heads.
This command shows what they do, on real models and without a network.
In Python, start with [bold]import manyheads as mh[/bold].

[bold]Examples[/bold]

  manyheads demo --sentence "Heads share the work."
      follow one sentence through a real sentence encoder, head by head

  manyheads inspect MODEL --text corpus.txt
      what every head of a model does on your text, counted exactly

  manyheads roles MODEL --treebank sentences.conllu
      which head does what, each claim against a baseline

  manyheads compare MODEL FINE-TUNED --text corpus.txt
      which heads changed, with standard errors

  manyheads prune MODEL --keep 0.5 --out small
      a smaller model, refitted, and what that costs and saves

  manyheads export small --to onnx --out small-onnx
      the same model for another runtime, run and compared

  manyheads cache MODEL --text book.txt --budget 0.5
      which key/value heads may forget, and what a smaller cache costs

  manyheads train translation
      train a small transformer; its folder is a MODEL for all of these

  manyheads sweep language --heads 1,2,4,8 --seeds 3
      how many heads a task needs, with intervals, and what cannot be told apart

  manyheads merge out/parts
      what --shard measured on parts of a text, added up exactly

  manyheads serve MODEL --open
      type, and see every head at once; silence some, and see what the model says
"""),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"manyheads {manyheads.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    language: Annotated[Literal["en", "zh"] | None, typer.Option("--language", help=LANGUAGE)] = None,
) -> None:
    """Options of the command itself."""
    choose_language(language)
    if context.invoked_subcommand is None:
        terminal.greeting.print_greeting()


# Verbs that need more memory for each token read fewer at once.
BATCH_TOKENS = {"importance": 1024, "diversity": 2048, "prune": 2048}
for verb in (
    cache, compare, demo, diversity, evaluate, export, importance, inspect, merge, predict, prune, push,
    roles, serve, study,
):  # fmt: skip
    app.command()(command(verb, BATCH_TOKENS.get(verb.__name__, 4096)))
app.add_typer(task_verb(train, RunOptions, Path("out")))
app.add_typer(task_verb(sweep, SweepOptions, Path("out/sweep")))


def main() -> None:
    """Run the command; a user's mistake is one sentence on stderr and exit code 2; Ctrl-C is 130."""
    signal.signal(signal.SIGINT, leave_at_once)  # `interruptible` is for work that has something to keep
    share_one_heap()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        runnable(app)()
    except (ValueError, ImportError, OSError, FailedChangeError) as error:
        extra = missing_extra(error) if isinstance(error, ImportError) else None
        typer.echo(f"manyheads: {extra or error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)
