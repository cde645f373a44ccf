"""``manyheads merge``: the parts of a text that ``--shard`` measured, as one result."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli.options import Json, Out
from manyheads.common.out_folder import prepared
from manyheads.view import terminal


def merge(
    shards: Annotated[
        list[Path], typer.Argument(help="Files that --shard wrote, or the folders that they are in.")
    ],
    out: Out = Path("out/merge"),
    json: Json = False,
) -> None:
    """Merge what inspect, roles, importance or diversity measured with --shard on parts of a text.

    Sums and counts add up exactly, so that the result, with its standard errors, is that of one process that
    reads the whole text; it is printed and written as the verb itself does, without the page of inspect.
    Parts that are missing, that overlap, or that are of another model, text or options are named, and
    nothing is written.

      manyheads inspect MODEL --text corpus.txt --shard 1/2 --out out/parts
      manyheads inspect MODEL --text corpus.txt --shard 2/2 --out out/parts
      manyheads merge out/parts
    """
    merged = mh.heads.measurements.merge_files(shards)
    with prepared(out):
        result = terminal.shards.merged_presentation(merged, out)
        terminal.presentation.present(result, as_json=json)
