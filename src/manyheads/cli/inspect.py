"""``manyheads inspect``: what every head of a model does on a corpus."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from manyheads.cli import options
from manyheads.common.interrupts import Interrupted, interrupted, interruptible
from manyheads.common.processes import rank


def inspect(
    source: options.Source,
    out: options.Out = Path("out/inspect"),
    json: options.Json = False,
) -> str | None:
    """What every head of a model does on a corpus: exact, at any length, under the model's fast kernels.

    Prints a map of layers and heads and the heads that stand out; writes heads.json, heads.csv, summary.txt
    and report.html: one page that shows every head. Ctrl-C keeps what was counted so far, a second one
    leaves at once. To use several processes, with or without GPUs, write
    `torchrun --nproc-per-node 2 -m manyheads inspect ...` or
    `accelerate launch --multi_gpu --num_processes 2 -m manyheads inspect ...`
    (accelerate starts a single process when it is given `--cpu`).
    """
    loaded, corpus = source.open(head=False)
    from manyheads.common.out_folder import prepared
    from manyheads.heads.inspect import count_corpus
    from manyheads.view.progress_bar import progress_bar
    from manyheads.view.terminal.inspect import InspectPresentation
    from manyheads.view.terminal.presentation import present

    with prepared(out), interruptible():
        with progress_bar(Console(stderr=True), unit=corpus.unit, hidden=rank() > 0) as progress:
            counted = count_corpus(loaded.model, corpus, progress)
        if counted.stopped and (rank() > 0 or counted.table is None):
            raise Interrupted
        if rank() > 0:
            return None
        result = InspectPresentation(counted, loaded, corpus, out)
        present(result, as_json=json)
        return result.ending(interrupted())
