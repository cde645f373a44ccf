"""``manyheads study``: claims about multi-head attention, run, drawn and judged."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.common.interrupts import interruptible
from manyheads.common.language import choose_language, current_language


def study(
    name: Annotated[str | None, typer.Argument(help="Which claim; all are listed by default.")] = None,
    full: Annotated[bool, "Minutes to an hour instead of 90 seconds."] = False,
    seeds: Annotated[int | None, "Repetitions; those of the size by default."] = None,
    data: Annotated[str | None, "Data to run it on; embedded data by default."] = None,
    set: Annotated[list[str] | None, "A setting, as in: heads=1,2,4"] = None,
    all: Annotated[bool, "Run every claim and write one page about all."] = False,
    language: options.Spoken = None,
    out: options.Out = Path("out/study"),
    json: options.Json = False,
) -> str | None:
    """Claims about multi-head attention: each is an experiment with a rule, a figure and a verdict.

    Without a name it lists the claims with their last verdicts. With one it runs that claim, in at most 90
    seconds on two cores, prints the numbers and the verdict, and writes result.json, figure.svg, figure.png,
    rows.csv and index.html under OUT/NAME. What was measured is kept: a run that was ended goes on.

    [bold]Examples[/bold]

      manyheads study
      manyheads study several_heads --set heads=1,2,4,8 --seeds 5
      manyheads study --all --out site
    """
    if language is not None:
        choose_language(language)
    language = current_language()
    view = mh.view.study
    with interruptible():
        if all:
            return view.run_all(view.request(full, seeds, data, set), out, language, as_json=json)
        if name is None:
            view.show_list(out, language, as_json=json)
            return None
        return view.run_one(name, view.request(full, seeds, data, set), out / name, language, as_json=json)
