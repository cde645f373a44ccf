"""The exponential moving average of a model's weights while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manyheads.training import checkpoint


class Average:
    """An exponential moving average of a model's weights, with a shorter memory at the beginning.

    Examples
    --------
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> average = Average(model, decay=0.9)
    >>> _ = nn.init.zeros_(model.weight)
    >>> average.update(step=0)
    >>> with average.in_place():
    ...     model.weight.item()
    0.1...
    >>> model.weight.item()
    0.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.values: dict[str, Tensor] = {
            name: value.clone() for name, value in checkpoint.weights(model).items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        now = checkpoint.weights(self.model)
        for name, value in self.values.items():
            if value.is_floating_point():
                value.lerp_(now[name], 1 - decay)
            else:
                value.copy_(now[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the average as its weights."""
        before = {name: value.clone() for name, value in checkpoint.weights(self.model).items()}
        checkpoint.set_weights(self.values, self.model)
        try:
            yield
        finally:
            checkpoint.set_weights(before, self.model)
