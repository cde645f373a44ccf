"""The conditions a run needs around it: random numbers of its own, no denormals, a polite Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from manyheads.common.untouched import untouched


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """The caller's random numbers are left alone; numbers too small to matter do not slow the CPU down."""
    with untouched():
        torch.set_flush_denormal(device.type == "cpu")
        yield


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, or the process asked to end. The second time ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield asked.is_set
        return

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {kind: signal.signal(kind, ask) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
