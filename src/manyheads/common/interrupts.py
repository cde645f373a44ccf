"""Ctrl-C, with one meaning everywhere.

The first one is noted: the running work finishes its unit (a batch, a step), keeps its results, and says so.
The second one does what Ctrl-C did before: in the `manyheads` command it leaves at once, in Python it raises
KeyboardInterrupt. The command's exit code is 130 in both cases. SIGTERM counts as Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from manyheads.common.numbered_batches import Numbered
from manyheads.common.processes import processes
from manyheads.common.whole_files import remove_unfinished

EXIT_CODE = 130
# torchrun sends its processes a SIGINT that the terminal has sent them already.
_SAME = 1.0  # second

_ctrl_c: threading.Event | None = None  # of the outermost `interruptible`
Item = TypeVar("Item")


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A context in which the first Ctrl-C is only noted; it yields a function that says whether it came.

    Nested contexts share the note. In threads other than the main one, which receive no signals, nothing
    changes.

    >>> with interruptible() as interrupted:
    ...     before = interrupted()
    ...     signal.raise_signal(signal.SIGINT)
    ...     before, interrupted()
    (False, True)
    """
    global _ctrl_c
    if _ctrl_c is not None or threading.current_thread() is not threading.main_thread():
        ctrl_c = _ctrl_c or threading.Event()
        yield ctrl_c.is_set
        return
    ctrl_c, first_time = threading.Event(), 0.0
    handlers: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def note(kind: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if not ctrl_c.is_set():
            first_time = time.monotonic()
            ctrl_c.set()
        elif processes() == 1 or time.monotonic() - first_time > _SAME:
            previous = handlers[kind]
            if callable(previous):
                previous(kind, frame)
            else:
                signal.signal(kind, previous or signal.SIG_DFL)
                signal.raise_signal(kind)

    for kind in (signal.SIGINT, signal.SIGTERM):
        handlers[kind] = signal.getsignal(kind)
        signal.signal(kind, note)
    _ctrl_c = ctrl_c
    try:
        yield ctrl_c.is_set
    finally:
        _ctrl_c = None
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def signals_silenced() -> Iterator[None]:
    """A context for code that handles Ctrl-C and SIGTERM itself, and raises the signal again when it is done.

    uvicorn does so, for the handler that was there before: inside, that one does nothing.

    >>> with signals_silenced():
    ...     signal.raise_signal(signal.SIGINT)
    """
    in_main = threading.current_thread() is threading.main_thread()
    kinds = [signal.SIGINT, signal.SIGTERM] if in_main else []
    before = {kind: signal.signal(kind, lambda *_: None) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, raised between two units of work."""


def interrupted() -> bool:
    """Whether Ctrl-C was pressed inside the current `interruptible`, if there is one."""
    return _ctrl_c is not None and _ctrl_c.is_set()


def stop_if_interrupted() -> None:
    """Raise `Interrupted` if Ctrl-C was noted: to call between two units of work."""
    if interrupted():
        raise Interrupted


def until_interrupted(items: Iterable[Item]) -> Iterator[Item]:
    """The items until Ctrl-C is noted, for work that keeps the results of the items so far.

    Raises `Interrupted` where Ctrl-C came before the first one: then there is nothing to keep.

    >>> with interruptible():
    ...     for number in until_interrupted(range(5)):
    ...         if number == 1:
    ...             signal.raise_signal(signal.SIGINT)
    ...         print(number)
    0
    1
    """
    for number, item in enumerate(items):
        if interrupted() and number == 0:
            raise Interrupted
        if interrupted():
            return
        yield item


class UntilInterrupted(Numbered[Item]):
    """The same as an object that has a length, for progress, and counts what was read of it.

    Batches that have numbers keep them.

    >>> batches = UntilInterrupted((n for n in range(5)), 5)
    >>> [next(iter(batches)), len(batches), batches.read]
    [0, 5, 1]
    """

    def __init__(self, items: Iterable[Item], length: int) -> None:
        numbers, total = (
            (items.numbers, items.total) if isinstance(items, Numbered) else (range(length), length)
        )
        super().__init__(items, numbers, total)
        self.read = 0

    def __iter__(self) -> Iterator[Item]:
        for item in until_interrupted(self.items):
            self.read += 1
            yield item


def leave_at_once(*_: object) -> None:
    """End this process at once: what Ctrl-C does in the command where there are no results to keep."""
    remove_unfinished()
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, b"\x1b[?25h\n")  # progress bars hide the cursor
    os._exit(EXIT_CODE)
