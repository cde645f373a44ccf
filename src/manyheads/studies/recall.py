"""Tasks with one answer a sequence: a training loop for them, and recall of a value by its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.nn.multihead import MultiHeadAttention

Draw = Callable[[], tuple[Any, Tensor]]


def training(
    model: nn.Module, draw: Draw, steps: int, learning_rate: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train on what ``draw`` gives, inputs and answers (batch,); after each backward pass the logits and the
    answers, while the model has gradients.

    >>> model = nn.Linear(3, 5)
    >>> draw = lambda: (torch.randn(4, 3), torch.randint(5, (4,)))
    >>> [tuple(logits.shape) for logits, answers in training(model, draw, steps=2, learning_rate=0.1)]
    [(4, 5), (4, 5)]
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        inputs, answers = draw()
        logits = model(inputs)
        optimizer.zero_grad()
        F.cross_entropy(logits, answers).backward()
        yield logits.detach(), answers
        optimizer.step()


@dataclass(frozen=True)
class Pairs:
    """Pairs of a key and a value, one of which is asked for by its key. A sequence has no key twice."""

    count: int = 16
    keys: int = 64
    values: int = 16

    def draw(self, batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Ids ``(batch, 2 * count + 1)``: keys, values, the key in question; and its values ``(batch,)``.

        >>> ids, answers = Pairs(count=2, keys=5, values=3).draw(4, torch.Generator().manual_seed(0))
        >>> ids.shape, answers.shape
        (torch.Size([4, 5]), torch.Size([4]))
        """
        keys = torch.rand(batch, self.keys, generator=random).argsort(1)[:, : self.count]
        values = torch.randint(self.values, (batch, self.count), generator=random)
        asked = torch.randint(self.count, (batch, 1), generator=random)
        return torch.cat([keys, values, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]


class Recall(nn.Module):
    """One layer of attention from the key in question to the pairs, and a projection to the values.

    >>> pairs = Pairs(count=2, keys=5, values=3)
    >>> ids, answers = pairs.draw(4, torch.Generator())
    >>> Recall(pairs, d_model=8, heads=2)(ids).shape
    torch.Size([4, 3])
    """

    def __init__(self, pairs: Pairs, d_model: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.count = pairs.count
        self.keys, self.values = nn.Embedding(pairs.keys, d_model), nn.Embedding(pairs.values, d_model)
        self.attention = MultiHeadAttention(d_model, heads, **options)
        self.answer = nn.Linear(d_model, pairs.values)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of `Pairs.draw` to logits ``(batch, values)``."""
        keys, values, asked = ids.split([self.count, self.count, 1], 1)
        tokens = self.keys(keys) + self.values(values)
        logits: Tensor = self.answer(self.attention(self.keys(asked), tokens)[:, 0])
        return logits
