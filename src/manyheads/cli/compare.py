"""``manyheads compare``: two models, or two texts, side by side: which heads moved."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli.options import Json, Open, Out
from manyheads.common.console import loading
from manyheads.common.interrupts import interruptible
from manyheads.common.out_folder import prepared
from manyheads.data.source import Model
from manyheads.heads.options import CompareOptions
from manyheads.models.opening import Opening
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def compare(
    opening: Opening,
    options: CompareOptions,
    model: Model = None,
    other: Annotated[
        str | None, typer.Argument(help="The model to compare with; the same one by default.")
    ] = None,
    out: Out = Path("out/compare"),
    open: Open = False,
    json: Json = False,
) -> None:
    """Which heads moved: a fine-tune against its base, cut against uncut, or two texts on one model.

    Heads are matched by what they do. Prints the heads that moved, each change with its standard error over
    texts and all of them under one false discovery rate; writes changes.json, changes.csv, compare.txt,
    heads.png and report.html.

    [bold]Examples[/bold]

      manyheads compare bert-base my-classifier --text reviews.txt
      manyheads compare MODEL out/prune --text corpus.txt --open
      manyheads compare MODEL --text english.txt --other-text chinese.txt
      manyheads compare owner/name --revision step1000 --other-revision step9000 --text corpus.txt
    """
    with loading(model):
        sides = mh.heads.comparison.sides.open_sides(model, other, options, opening)
    with prepared(out), interruptible():
        with progress_bar() as progress:
            compared = mh.heads.comparison.sides.compare_sides(sides, options, progress)
        result = terminal.compare.ComparePresentation(compared, sides, out)
        terminal.presentation.present(result, as_json=json)
        if open:
            terminal.presentation.open_file(out / "report.html")
