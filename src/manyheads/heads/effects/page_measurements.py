"""What the pages show about heads, each part measured by one call: view only draws it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from manyheads.common.progress import Progress, no_progress
from manyheads.common.registry import registered
from manyheads.common.types import Batch
from manyheads.heads.diversity import diversity
from manyheads.heads.importance import importance
from manyheads.heads.importance.gradients import fisher
from manyheads.heads.importance.request import Request
from manyheads.heads.inspect import Counted, count, merge_processes, table_or_error
from manyheads.heads.roles import roles
from manyheads.heads.roles.probe_texts import TEXT
from manyheads.heads.table import HeadTable
from manyheads.nn.statistics import StatisticsSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def count_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    tokens: Mapping[str, Iterable[int]] | None = None,
    statistics: StatisticsSet = "full",
) -> Counted:
    """The counts of these batches, and of those of all other processes; Ctrl-C keeps those so far."""
    return merge_processes(count(model, ((0, batch) for batch in batches), tokens, statistics))


def counted_table(
    model: nn.Module,
    batches: Sequence[Batch],
    tokens: Mapping[str, Iterable[int]] | None = None,
    progress: Progress = no_progress,
) -> HeadTable:
    """The statistics of every head on some batches, or the error that says why there are none.

    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> counted_table(Encoder(d_model=8, heads=2, layers=1, vocabulary=17), [torch.arange(5)[None]])
    HeadTable(2 heads at 1 sites, 5 tokens: ...)
    """
    numbered = ((1, batch) for batch in batches)
    return table_or_error(
        count(model, numbered, tokens, progress=lambda stage, done, _: progress(stage, done, len(batches)))
    )


def fisher_ranking(
    model: nn.Module, batches: Sequence[Batch], estimates: int, progress: Progress = no_progress
) -> HeadTable:
    """Fisher importance, by no more than this many estimates for each head."""
    return fisher(Request(model, batches, progress=progress), enough=estimates)


def ranking(
    model: nn.Module, batches: Sequence[Batch], method: str, progress: Progress = no_progress
) -> HeadTable:
    """Importance by a method."""
    return importance(model, batches, method, progress=progress)


def redundancy(
    model: nn.Module, batches: Sequence[Batch], *, outputs: bool, progress: Progress = no_progress
) -> HeadTable:
    """How alike heads attend, in the whole model; with ``outputs`` also what they output, within layers."""
    if outputs:
        return diversity(model, batches, measures=("attention", "outputs"), across=False, progress=progress)
    return diversity(model, batches, measures=["attention"], progress=progress)


def roles_of_heads(
    model: nn.Module,
    batches: Sequence[Batch],
    tokenizer: PreTrainedTokenizerBase | None,
    context: int = TEXT,
    progress: Progress = no_progress,
) -> HeadTable:
    """The roles of heads; ``context`` is the number of tokens around a planted key."""
    return roles(model, batches, tokenizer=tokenizer, context=context, progress=progress)


def silencing_curve(
    model: nn.Module,
    batches: Sequence[Batch],
    rankings: Mapping[str, HeadTable],
    progress: Progress = no_progress,
) -> Any:
    """Quality as more and more heads are silenced: what `surgery.silencing_curve` returns."""
    return registered("effects.silencing_curve")(model, batches, rankings, progress=progress)
