"""How far a long piece of work is: one protocol for every function that takes ``progress=``."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Protocol


class Progress(Protocol):
    """A function that is called as work goes on; it may draw a bar.

    >>> def shown(stage: str, done: float, total: float | None) -> None:
    ...     print(f"{stage}: {done} of {total}")
    >>> progress: Progress = shown
    >>> progress("refit", 3, 12)
    refit: 3 of 12
    """

    def __call__(self, stage: str, done: float, total: float | None) -> None:
        """``stage`` is a word such as "rank" or "refit"; ``done`` counts up to ``total``, which is None where
        the end is not known (batches from a generator).
        """


def no_progress(stage: str, done: float, total: float | None) -> None:
    """The default: show nothing."""


def count_of(items: Iterable[object]) -> int | None:
    """How many items there are, for `total`; None where only reading them would show it.

    >>> count_of([3, 5]), count_of(iter([3, 5]))
    (2, None)
    """
    return len(items) if isinstance(items, Sized) else None
