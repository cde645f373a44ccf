"""The ``manyheads`` command: every verb is one function here and one call into the library."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import manyheads

SENTENCE = "The animal did not cross the street because it was too tired."

app = typer.Typer(
    name="manyheads",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Build, see, measure and cut the attention heads of any transformer.

A transformer looks at its input through many small attention heads.
This command shows what they do, on real models and without a network.
In Python, [bold]import manyheads as mh[/bold] has the parts to build with.

[bold]Examples[/bold]

  manyheads demo
      follow one sentence through a real sentence encoder, head by head

  manyheads demo --sentence "Heads share the work." --out pictures
      the same with your sentence, the picture of all heads in pictures/

  manyheads inspect MODEL --text corpus.txt
      what every head of a model does on your text, counted exactly
""",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"manyheads {manyheads.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def demo(
    sentence: Annotated[str, typer.Option(help="What to send through the model.")] = SENTENCE,
    out: Annotated[Path, typer.Option(help="The folder for the picture; made if it is not there.")] = Path(
        "out/demo"
    ),
) -> None:
    """Follow a sentence through the heads of MiniLM, a real sentence encoder of 6 layers with 12 heads each.

    Prints every step with its shape and a few of its numbers: tokens, ids, embedding, positions, each head's
    queries, keys and values, its attention map, concatenation, output projection, sentence embedding. Writes
    a picture of all 72 maps. The attention is computed by this package, and held against MiniLM's own.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from rich.console import Console

    console, progress = Console(), Console(stderr=True)
    with progress.status("Loading torch and the embedded MiniLM"):
        from manyheads.embedded import load
        from manyheads.view.pipeline import pipeline

        way = pipeline(*load(), sentence)
    from manyheads.view.figure import draw
    from manyheads.view.terminal import tell

    tell(way, console)
    path = out / "heads.png"
    with progress.status("Drawing all maps"):
        draw([layer.seen for layer in way.layers], way.tokens, path, way.text)
    console.print(f"\nAll {sum(len(layer.seen) for layer in way.layers)} maps: {path}", soft_wrap=True)


@app.command()
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a hub name, or package.module:factory; without it, the embedded MiniLM."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A text file, one text a line; - reads standard input.")
    ] = None,
    images: Annotated[str | None, typer.Option(help="A folder of pictures.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token ids in a NumPy file: (sequences, length) or (length,).")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut longer sequences into pieces of this many tokens.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Read only so many texts, pictures or sequences.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="How many tokens run through the model at once.")] = 4096,
    out: Annotated[Path, typer.Option(help="The folder for the results; made if it is not there.")] = Path(
        "out/inspect"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """What every head of a model does on a corpus: exact, at any length, under the model's fast kernels.

    Prints a map of layers and heads and the heads that stand out; writes heads.json, heads.csv and
    summary.txt. Ctrl-C keeps what was counted so far. To use several processes, write
    `torchrun --nproc-per-node 2 -m manyheads inspect ...`; `accelerate launch` works as well.
    """
    from manyheads.inspect_command import run

    code = run(
        model,
        out,
        text=text,
        images=images,
        tokens=tokens,
        max_length=max_length,
        limit=limit,
        batch_tokens=batch_tokens,
        machine=json,
    )
    raise typer.Exit(code)


def main() -> None:
    """Run the command; a mistake of the user is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"manyheads: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
