"""Batches with labels, which are for the loss of their task and not for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from manyheads.common.types import Batch, Keywords, ModelOutput

# The names under which models of transformers take what they are to answer.
LABELS = frozenset({"labels", "start_positions", "end_positions"})


class LabelledTask(Protocol):
    """How answers are judged: the part of `manyheads.data.labelled` that every room uses."""

    @property
    def measure(self) -> str:
        """What the scores are, as "accuracy"."""

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """The loss of each sequence, (batch,), from what the model returned."""

    def scores(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """The score of each sequence and its weight, (batch, 2) in float64."""


class LabelledBatch(dict[str, Any]):
    """A batch with labels, which are for the loss of its task, not for the model: `run` leaves them out.

    A model that computes a loss itself writes into its config which kind of problem it is. ``model(**batch)``
    still gives that loss to whoever wants it.

    Attributes
    ----------
    task: what its labels are for.
    examples: what its sequences were made from, in order.

    >>> import torch
    >>> batch = LabelledBatch({"x": torch.ones(2), "labels": torch.tensor(1)}, task=None)
    >>> sorted(batch.map(torch.neg)), sorted(without_labels(batch))
    (['labels', 'x'], ['x'])
    """

    def __init__(self, items: Mapping[str, Any], task: Any, examples: Sequence[Any] = ()) -> None:
        super().__init__(items)
        self.task: LabelledTask = task
        self.examples = examples

    def map(self, function: Callable[[object], object]) -> LabelledBatch:
        """The same batch with a function applied to its items."""
        changed = {name: function(item) for name, item in self.items()}
        return LabelledBatch(changed, self.task, self.examples)


def without_labels(batch: Batch) -> Any:
    """A batch without its labels, as the model takes it.

    >>> without_labels({"x": 1, "labels": 2})
    {'x': 1}
    """
    if not isinstance(batch, Mapping):
        return batch
    return {name: item for name, item in batch.items() if name not in LABELS}
