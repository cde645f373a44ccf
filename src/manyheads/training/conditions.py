"""The conditions a run needs around it: random numbers of its own, no denormals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from manyheads.common.untouched import untouched


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """The caller's random numbers are left alone; numbers too small to matter do not slow the CPU down."""
    with untouched():
        torch.set_flush_denormal(device.type == "cpu")
        yield
