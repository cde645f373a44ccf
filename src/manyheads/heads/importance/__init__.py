"""Which heads matter: several ways to say so, each with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from manyheads.heads.importance.gradients import fisher
from manyheads.heads.importance.leave_one_out import leave_one_out
from manyheads.heads.importance.losses import Loss
from manyheads.heads.importance.task import Task, no_step
from manyheads.heads.table import HeadTable

METHODS: dict[str, Callable[[Task], HeadTable]] = {
    "fisher": fisher,
    "leave-one-out": leave_one_out,
}


def importance(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "fisher",
    loss: Loss | None = None,
    *,
    seed: int = 0,
    state: str | PathLike[str] | None = None,
    step: Callable[[float], None] = no_step,
) -> HeadTable:
    """How much each head of a model matters: a table with the column ``importance`` and its standard error.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> batches = [torch.randn(2, 5, 8), torch.randn(3, 7, 8)]
    >>> importance(model, batches)
    HeadTable(6 heads at 3 sites, 31 tokens: importance)
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    where = None if state is None else Path(state)
    return METHODS[method](Task(model, batches, loss, seed=seed, state=where, step=step))
