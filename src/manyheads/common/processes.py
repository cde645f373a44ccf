"""Which of several processes this one is, as torchrun and accelerate launch say."""

from __future__ import annotations

import os


def rank() -> int:
    """Which of the processes this one is, as torchrun and accelerate launch say."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """How many processes share the work."""
    return int(os.environ.get("WORLD_SIZE", 1))
