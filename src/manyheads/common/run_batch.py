"""Running a model on a batch."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature

from torch import nn

from manyheads.common.labelled_batch import LabelledBatch, without_labels
from manyheads.common.types import Batch, ModelOutput


def run(model: nn.Module, batch: Batch) -> ModelOutput:
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


def run_heads(model: nn.Module, batch: Batch) -> ModelOutput:
    """Run a model on a batch for the sake of its heads alone; what it returns may be less than from `run`.

    A language model of transformers is asked for the logits of the last token only: heads do not depend on
    them, and those of all tokens take the size of the vocabulary times the text.

    >>> import torch
    >>> run_heads(nn.Identity(), torch.ones(2))
    tensor([1., 1.])
    """
    if isinstance(batch, Mapping) and "logits_to_keep" in signature(model.forward).parameters:
        batch = {**without_labels(batch), "logits_to_keep": 1}
    return run(model, batch)
