"""``manyheads inspect``: what every head of a model does on a corpus."""

from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli.measuring import measure
from manyheads.cli.options import Json, Open, Out
from manyheads.data.source import Source
from manyheads.data.split import Split


def inspect(
    source: Source,
    split: Split,
    page: Annotated[bool, "Write report.html, for which a little more is measured on a sample."] = True,
    out: Out = Path("out/inspect"),
    open: Open = False,
    json: Json = False,
) -> str | None:
    """What every head of a model does on a corpus: exact, at any length, under the model's fast kernels.

    Prints a map of layers and heads and the heads that stand out; writes heads.json, heads.csv, summary.txt
    and report.html: one page that shows every head. Ctrl-C keeps what was counted so far; a second one
    exits at once. To use several processes, with or without GPUs, write
    `torchrun --nproc-per-node 2 -m manyheads inspect ...` or
    `accelerate launch --multi_gpu --num_processes 2 -m manyheads inspect ...`
    (accelerate starts a single process when it is given `--cpu`); to use several machines, --ray, or --shard
    on each of them and `manyheads merge`.
    """
    return measure(mh.heads.measurements.verbs.Inspect(), source, split, out, json, page=page, open=open)
