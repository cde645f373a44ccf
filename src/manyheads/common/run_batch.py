"""Running a model on a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from manyheads.common.labelled_batch import LabelledBatch, without_labels
from manyheads.common.types import Batch


def run(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch: a dict as keyword arguments, a tuple or list as positional ones, anything
    else as one. The labels of a `LabelledBatch` are left out.

    >>> import torch
    >>> run(nn.Identity(), torch.ones(2))
    tensor([1., 1.])
    """
    if isinstance(batch, LabelledBatch):
        return model(**without_labels(batch))
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
