"""The conditions a run needs around it: random numbers of its own, no denormals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """The caller's random numbers are left alone; numbers too small to matter do not slow the CPU down."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device.index or 0]):
        torch.set_flush_denormal(device.type == "cpu")
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
