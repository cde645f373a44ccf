"""``manyheads inspect``: what every head of a model does on a corpus."""

from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli import options
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.out_folder import prepared
from manyheads.common.processes import rank
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def inspect(
    source: options.Source,
    split: options.Split,
    page: Annotated[bool, "Write report.html, for which a little more is measured on a sample."] = True,
    out: options.Out = Path("out/inspect"),
    open: options.Open = False,
    json: options.Json = False,
) -> str | None:
    """What every head of a model does on a corpus: exact, at any length, under the model's fast kernels.

    Prints a map of layers and heads and the heads that stand out; writes heads.json, heads.csv, summary.txt
    and report.html: one page that shows every head. Ctrl-C keeps what was counted so far, a second one
    leaves at once. To use several processes, with or without GPUs, write
    `torchrun --nproc-per-node 2 -m manyheads inspect ...` or
    `accelerate launch --multi_gpu --num_processes 2 -m manyheads inspect ...`
    (accelerate starts a single process when it is given `--cpu`); to use several machines, --ray, or --shard
    on each of them and `manyheads merge`.
    """
    loaded, corpus = source.open()
    with prepared(out, split.file), interruptible():
        with progress_bar(unit=corpus.unit if split.ray is None else "", hidden=rank() > 0) as progress:
            counted = split.measured(
                mh.heads.measurements.verbs.Inspect(), loaded, corpus, source.open, out, progress
            )
        if options.present_part(counted, out, as_json=json) or rank() > 0:
            return None
        shown = loaded if page else None
        result = terminal.inspect.InspectPresentation(counted, loaded.name, corpus, out, shown)
        terminal.presentation.present(result, as_json=json)
        if open and page:
            terminal.presentation.open_file(out / "report.html")
        return result.ending(interrupted())
