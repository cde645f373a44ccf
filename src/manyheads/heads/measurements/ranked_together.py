"""Ranking heads by the processes of torchrun together, each of which reads a part of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from manyheads.capture.site import Unverified
from manyheads.common.numbered_batches import Numbered
from manyheads.common.processes import gathered, processes, rank
from manyheads.common.progress import Progress, no_progress
from manyheads.common.registry import registered
from manyheads.common.types import Batch
from manyheads.heads.importance import importance
from manyheads.heads.importance.request import Request
from manyheads.heads.measurements.verbs import ELIMINATION, SUMS, merged_tables
from manyheads.heads.table import HeadTable


def ranked_together(
    model: nn.Module,
    batches: Sequence[Batch],
    method: str,
    *,
    unverified: Unverified = "refuse",
    memory: str | int | None = None,
    progress: Progress = no_progress,
) -> HeadTable:
    """As `importance`, called by every process with the same model and batches; the same table in each.

    Methods whose numbers do not add up are computed by every process from all batches.

    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17).eval()
    >>> ranked_together(model, [torch.arange(11).view(1, 11)], "fisher")
    HeadTable(2 heads at 1 sites, 11 tokens: importance)
    """
    if processes() == 1 or method not in (*SUMS, ELIMINATION):
        return importance(model, batches, method, unverified=unverified, memory=memory, progress=progress)
    numbers = range(rank(), len(batches), processes())
    part = Numbered([batches[number] for number in numbers], numbers, len(batches))
    ours: dict[str, Any] | None = None  # where there are fewer batches than processes
    if numbers and method == ELIMINATION:
        ours = registered("importance.elimination.part")(Request(model, part, memory=memory))
    elif numbers:
        ours = {"table": importance(model, part, method, unverified=unverified, progress=progress)}
    parts = [each for each in gathered(ours) if each is not None]
    table = merged_tables([each["table"] for each in parts])
    if method != ELIMINATION:
        return table
    joined: HeadTable = registered("importance.elimination.joined")(
        table, [each["moments"] for each in parts]
    )
    return joined
