"""Examples to learn from, and their order: a function of the seed and the step alone.

So a run that was killed continues with the batches it would have had, and two processes share the batches
that one would have alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from manyheads.data.batches import bucketed

# What a model reads of an example, and what it is to predict; more tensors where a task has more.
Example: TypeAlias = tuple[Tensor, ...]


@dataclass(eq=False)
class Examples:
    """Examples that a model learns from, or is measured on.

    Attributes
    ----------
    sizes: the number of tokens of each example. A batch holds examples of similar sizes.
    make: ``make(index, random)`` gives an example; its random part comes from the generator alone.

    Examples
    --------
    >>> examples = Examples([3, 5, 4], lambda index, random: (torch.arange(index),))
    >>> len(examples), examples.take([2])
    (3, [(tensor([0, 1]),)])
    """

    sizes: Sequence[int]
    make: Callable[[int, torch.Generator], Example] = field(repr=False)

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, indices: Sequence[int], *key: int) -> list[Example]:
        """These examples. Their random part depends on the key and on which example it is."""
        return [self.make(i, torch.Generator().manual_seed(seed_of(*key, i))) for i in indices]

    def digest(self) -> str:
        """A hash of the sizes, to notice that a run is resumed on other data."""
        return hashlib.sha256(",".join(map(str, self.sizes)).encode()).hexdigest()[:16]


def seed_of(*numbers: int) -> int:
    """One seed from several numbers, all of which matter.

    >>> len({seed_of(0, 1), seed_of(1, 0), seed_of(0, 1, 0)})
    3
    """
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Order:
    """The batches of a run.

    Every epoch shows each example once. It shuffles the examples, batches those of similar sizes, and
    shuffles the batches.

    Examples
    --------
    >>> order = Order([2, 2, 5, 5, 3], batch_tokens=10, seed=0)
    >>> order.batches, order.epoch(7)                        # in an epoch; the epoch of step 7
    (2, 3)
    >>> sorted(order.batch(0) + order.batch(1))
    [0, 1, 2, 3, 4]
    >>> order.batch(7) == Order([2, 2, 5, 5, 3], batch_tokens=10, seed=0).batch(7)
    True
    """

    def __init__(self, sizes: Sequence[int], batch_tokens: int, seed: int) -> None:
        if not len(sizes):
            raise ValueError("data: expected at least one example to train on, got none")
        self.sizes = sizes
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.batches = len(bucketed(sizes, batch_tokens))
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def epoch(self, step: int) -> int:
        """The number of epochs before this step."""
        return step // self.batches

    def batch(self, step: int) -> list[int]:
        """The indices of the examples of a step."""
        return self._plan(self.epoch(step))[step % self.batches]

    def _make_plan(self, epoch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        shuffled = torch.randperm(len(self.sizes), generator=random).tolist()
        # sorting by size keeps the shuffled order of equal sizes, and gives every epoch as many batches
        plan = bucketed([self.sizes[i] for i in shuffled], self.batch_tokens)
        order = torch.randperm(len(plan), generator=random).tolist()
        return [[shuffled[i] for i in plan[number]] for number in order]


def spread(examples: int, most: int) -> list[int]:
    """At most ``most`` indices, evenly over all examples; 0 for all.

    >>> spread(10, 3)
    [0, 3, 6]
    """
    return list(range(examples)) if not 0 < most < examples else [i * examples // most for i in range(most)]
