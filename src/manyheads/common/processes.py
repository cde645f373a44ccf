"""Which of several processes this one is, as torchrun and accelerate launch set it.

Read from the environment, since `inspect` must run where accelerate is not installed; training and evaluation
use accelerate's PartialState.
"""

from __future__ import annotations

import os


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """The number of processes that share the work."""
    return int(os.environ.get("WORLD_SIZE", 1))
