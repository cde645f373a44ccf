"""What every head of a model does on some batches: a table, and the files that people read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.out_folder import prepared, writing
from manyheads.common.processes import rank
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.common.whole_files import write_whole
from manyheads.heads.effects.page_measurements import count_batches
from manyheads.heads.inspect import Counted, table_or_error
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.nn.statistics import StatisticsSet
from manyheads.view.document.assemble import About, document
from manyheads.view.document.sample import TOKENS, FirstBatches, Sample, of_batches
from manyheads.view.report import write_report
from manyheads.view.terminal.summary import summary_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def inspect(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    tokens: Mapping[str, Iterable[int]] | None = None,
    out: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    statistics: StatisticsSet = "full",
) -> HeadTable:
    """What every head of a model does on these batches: statistics of its attention, one row for each head.

    Parameters
    ----------
    model: any torch.nn.Module. It runs in eval mode, without gradients.
    batches: dicts (passed by name), tuples (passed in order) or tensors.
    tokens: token ids by name, as in `watch`: adds the share of attention on each group.
    out: a folder for ``heads.json``, ``heads.csv``, ``summary.txt`` and ``report.html``, the page, for which
        a little more is measured; created if it does not exist.
    tokenizer: the model's: the page then shows words instead of token ids.
    statistics: ``"full"``, or ``"core"`` for the cheaper set; see `watch`.

    Ctrl-C ends the counting after the current batch and keeps what was counted; a second one raises
    KeyboardInterrupt at once. Under torchrun or accelerate launch, give each process its own part of the
    batches: every process gets the table of all.

    See Also
    --------
    watch : the same statistics, collected while you run the model yourself.
    report : writes the page of a table that you already have.
    roles, diversity, importance : measure more about the heads.

    References
    ----------
    Clark, K., Khandelwal, U., Levy, O. and Manning, C. D. (2019). What Does BERT Look At? An Analysis of
    BERT's Attention. BlackboxNLP.

    Examples
    --------
    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> table = inspect(model, [torch.randn(2, 5, 8), torch.randn(1, 7, 8)])
    >>> len(table), table["tokens"][0].item(), "distance" in table.columns
    (6, 17.0, True)
    """
    first = FirstBatches(batches, TOKENS)
    with nullcontext() if out is None else prepared(Path(out)), interruptible():
        counted = count_batches(model, first, tokens, statistics)
        if out is not None and counted.table is not None and rank() == 0:
            write_table(counted.table, Path(out), summary_text(counted.table))
            about = About(type(model).__name__, notes=notes(counted))
            sample = partial(of_batches, first.batches, model)
            write_page(counted, Path(out), model, sample, about=about, tokenizer=tokenizer)
    return table_or_error(counted)


def notes(counted: Counted) -> list[str]:
    """What a reader has to know about a count, besides the notes on its sites in the table."""
    unverified = {} if counted.table is None else doubts_in(counted.table).unverified
    missed = {path: why for path, why in counted.missed.items() if path not in unverified}
    of_model = missed.pop("", "")
    sentences = [f"{path} was not seen: {why}" for path, why in missed.items()]
    if of_model and not unverified:
        sentences.append(of_model)
    if counted.stopped or counted.error is not None:
        sentences.append("The counting ended early: these numbers are of a part of the corpus.")
    return sentences


def write_page(
    counted: Counted,
    out: Path,
    model: nn.Module,
    sample: Callable[[], Sample],
    *,
    about: About,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: object = None,
    progress: Progress = no_progress,
) -> bool:
    """Write the page of a count to ``report.html``; whether all parts of it were measured.

    Ctrl-C ends the measuring, and the page has the parts that were finished. After a count that ended early,
    the page has the numbers of the table alone. Keywords as in `document`.
    """
    assert counted.table is not None
    complete = not counted.stopped and counted.error is None and not interrupted()
    page = document(
        counted.table,
        model if complete else None,
        sample() if complete else None,
        about=about,
        tokenizer=tokenizer,
        processor=processor,
        progress=progress,
    )
    with writing(out):
        write_report(page, out / "report.html")
    return complete and not page["header"]["stopped"]


def write_table(table: HeadTable, out: Path, text: str) -> list[Path]:
    """Write the table and its summary into a folder, each file completely or not at all; returns them."""
    files = [out / name for name in ("heads.json", "heads.csv", "summary.txt")]
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        table.save(files[0])
        table.save(files[1])
        write_whole(files[2], text)
    return files
