"""Batches with their numbers among all: what is random depends on the batch, not on who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from manyheads.common.progress import count_of

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")


class Numbered(Generic[Item]):
    """Some of the batches of a corpus, and the number of each among all of them.

    Parameters
    ----------
    items: the batches.
    numbers: of each, from 0.
    total: how many batches there are in all.

    >>> part = Numbered(["b", "d"], numbers=range(1, 5, 2), total=5)
    >>> list(numbered(part)), len(part), count_of_all(part)
    ([(1, 'b'), (3, 'd')], 2, 5)
    """

    def __init__(self, items: Iterable[Item], numbers: Sequence[int], total: int) -> None:
        self.items, self.numbers, self.total = items, numbers, total

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)


def numbered(batches: Iterable[Item], items: Iterable[Item] | None = None) -> Iterator[tuple[int, Item]]:
    """Each batch with its number among all; ``items`` are the same batches elsewhere (on a device).

    >>> list(numbered("ab"))
    [(0, 'a'), (1, 'b')]
    """
    items = batches if items is None else items
    if isinstance(batches, Numbered):
        yield from zip(batches.numbers, items, strict=False)  # Ctrl-C ends them early
    else:
        yield from enumerate(items)


def count_of_all(batches: Iterable[object]) -> int | None:
    """How many batches there are in all, also where these are a part; None where that is not known.

    >>> count_of_all(Numbered(["b"], numbers=[1], total=5)), count_of_all(iter("ab"))
    (5, None)
    """
    return batches.total if isinstance(batches, Numbered) else count_of(batches)


def read_once(batches: Iterable[object]) -> bool:
    """Whether batches are gone when they are read.

    >>> read_once([1]), read_once(iter([1])), read_once(Numbered(iter([1]), range(1), 1))
    (False, True, True)
    """
    while isinstance(batches, Numbered):
        batches = batches.items
    return isinstance(batches, Iterator)


def generator_of(seed: int, number: int) -> torch.Generator:
    """The random numbers of one batch: the same whatever was read before it.

    >>> import torch
    >>> one, again, other = (torch.rand(1, generator=generator_of(7, n)) for n in (3, 3, 4))
    >>> bool(one == again), bool(one == other)
    (True, False)
    """
    import torch  # the command's help, which needs no batches, loads this module, too

    mixed = seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9  # far from other seeds and numbers
    return torch.Generator().manual_seed(mixed % 2**63)
