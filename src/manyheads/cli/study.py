"""``manyheads study``: claims about multi-head attention, run, drawn and judged."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli.options import Json, Out
from manyheads.studies.options import StudyOptions


def study(
    name: Annotated[str | None, typer.Argument(help="Which claim; all are listed by default.")] = None,
    *,
    options: StudyOptions,
    all: Annotated[bool, "Run every claim and write one page about all."] = False,
    out: Out = Path("out/study"),
    json: Json = False,
) -> str | None:
    """Claims about multi-head attention: each is an experiment with a rule, a figure and a verdict.

    Without a name it lists the claims with their last verdicts. With one it runs that claim, in at most 90
    seconds on two cores, prints the numbers and the verdict, and writes result.json, figure.svg, figure.png,
    rows.csv and index.html under OUT/NAME. What was measured is kept: an interrupted run continues.

    [bold]Examples[/bold]

      manyheads study
      manyheads study several_heads --set heads=1,2,4,8 --seeds 5
      manyheads study --all --out site
    """
    return mh.view.study.run(name, options, out, every=all, as_json=json)
