"""Ctrl-C between two units: what was read is kept, and where nothing was read there is nothing to keep."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from manyheads.common.interrupts import Interrupted, UntilInterrupted, interruptible


def batches(pressed: int) -> Iterator[int]:
    for number in range(5):
        if number == pressed:
            signal.raise_signal(signal.SIGINT)
        yield number


def test_what_was_read_is_counted() -> None:
    with interruptible():
        read = UntilInterrupted(batches(pressed=2), 5)
        assert list(read) == [0, 1]
    assert (read.read, len(read)) == (2, 5)


def test_nothing_to_keep_is_an_interruption() -> None:
    with interruptible(), pytest.raises(Interrupted):
        list(UntilInterrupted(batches(pressed=0), 5))
