"""inspect: what every head of a model does on these batches, as a table, and written down for people."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.out_folder import prepared, writing
from manyheads.common.processes import rank
from manyheads.common.whole_files import write_whole
from manyheads.heads.inspect import Counted, count, finished, together
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.nn.statistics import StatisticsSet
from manyheads.view.document.assemble import About, document
from manyheads.view.document.sample import TOKENS, Kept, Sample, of_batches
from manyheads.view.report import write_report
from manyheads.view.terminal.summary import summary_text


def inspect(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tokens: Mapping[str, Iterable[int]] | None = None,
    out: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    statistics: StatisticsSet = "full",
) -> HeadTable:
    """What every head of a model does on these batches: statistics of its attention, one row for each head.

    Parameters
    ----------
    model: any torch.nn.Module. It runs in eval mode, without gradients.
    batches: dicts (passed by name), tuples (passed in order) or tensors.
    tokens: token ids by name, as in `watch`: adds the share of attention on each group.
    out: a folder for ``heads.json``, ``heads.csv``, ``summary.txt`` and ``report.html``, the page for which
        a little more is measured; made if it is not there.
    tokenizer: the model's, so that the page shows words and not the numbers of tokens.
    statistics: ``"full"``, or ``"core"`` for the cheaper set; see `watch`.

    Ctrl-C ends the counting after the batch that runs, and keeps what was counted; a second one raises
    KeyboardInterrupt at once. Under torchrun or accelerate launch, give each process its own part of the
    batches: every process gets the table of all.

    Examples
    --------
    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> table = inspect(model, [torch.randn(2, 5, 8), torch.randn(1, 7, 8)])
    >>> len(table), table["tokens"][0].item(), "distance" in table.columns
    (6, 17.0, True)
    """
    kept = Kept(batches, TOKENS)
    with nullcontext() if out is None else prepared(Path(out)), interruptible():
        own = count(model, ((0, batch) for batch in kept), tokens, statistics)
        counted = together(own)
        if out is not None and counted.table is not None and rank() == 0:
            write(counted.table, Path(out), summary_text(counted.table))
            about = About(type(model).__name__, notes=notes(counted))
            sample = partial(of_batches, kept.batches, model)
            tell(counted, Path(out), model, sample, about=about, tokenizer=tokenizer)
    return finished(counted)


def notes(counted: Counted) -> list[str]:
    """What a reader has to know about a count, besides what the table says of its sites."""
    named = {} if counted.table is None else doubts_in(counted.table).unverified
    missed = {path: why for path, why in counted.missed.items() if path not in named}
    whole = missed.pop("", "")
    found = [f"{path} was not seen: {why}" for path, why in missed.items()]
    if whole and not named:
        found.append(whole)
    if counted.stopped or counted.error is not None:
        found.append("The counting ended early: these are the numbers of a part of the corpus.")
    return found


def tell(counted: Counted, out: Path, model: nn.Module, sample: Callable[[], Sample], **told: Any) -> bool:
    """Make the page of a count and write it to ``report.html``; whether all that it needs was measured.

    Ctrl-C ends the measuring, and the page has what there is. After a count that ended early, the page has
    the numbers of the table alone. Keywords as in `document`.
    """
    assert counted.table is not None
    whole = not counted.stopped and counted.error is None
    chosen = sample() if whole and not interrupted() else None
    page = document(counted.table, model if chosen is not None else None, chosen, **told)
    with writing(out):
        write_report(page, out / "report.html")
    return chosen is not None and not page["made"]["stopped"]


def write(table: HeadTable, out: Path, text: str) -> list[Path]:
    """Write the table and its summary under a folder, each file whole or not at all; returns the files."""
    files = [out / name for name in ("heads.json", "heads.csv", "summary.txt")]
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        table.save(files[0])
        table.save(files[1])
        write_whole(files[2], text)
    return files
