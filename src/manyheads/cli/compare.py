"""``manyheads compare``: two models, or two texts, side by side: which heads moved."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.common.interrupts import interruptible
from manyheads.common.out_folder import prepared
from manyheads.models.opening import Opening
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def compare(
    opening: Opening,
    model: options.Model = None,
    other: Annotated[
        str | None, typer.Argument(help="The model to compare with; the same one by default.")
    ] = None,
    text: options.Text = None,
    other_text: Annotated[
        str | None, "What the second model reads; the same text by default.", "Corpus"
    ] = None,
    images: options.Images = None,
    max_length: options.MaxLength = None,
    limit: Annotated[int, "Read at most this many texts or images.", "Corpus"] = 200,
    match: Annotated[
        Literal["function", "number"], "Match heads by what they do, or by their numbers before any cut."
    ] = "function",
    rate: Annotated[float, "The false discovery rate: wrong findings, as a share of all findings."] = 0.05,
    other_revision: Annotated[
        str | None, "A branch, tag or commit of the second model; --revision is the first one's.", "Model"
    ] = None,
    out: options.Out = Path("out/compare"),
    open: options.Open = False,
    json: options.Json = False,
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
    if other is None and other_text is None and other_revision is None:
        raise ValueError(
            "compare: got one model and one text; expected a second model, --other-revision or --other-text"
        )
    with options.loading(model):
        sides = mh.heads.comparison.sides.open_sides(
            (model, other), (text, other_text), images, max_length=max_length, limit=limit, opening=opening,
            other_revision=other_revision,
        )  # fmt: skip
    with prepared(out), interruptible():
        with progress_bar() as progress:
            compared = mh.heads.comparison.sides.compare_sides(
                sides, match=match, rate=rate, progress=progress
            )
        result = terminal.compare.ComparePresentation(compared, sides, out)
        terminal.presentation.present(result, as_json=json)
        if open:
            terminal.presentation.open_file(out / "report.html")
