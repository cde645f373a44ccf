"""What every method of importance is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyheads.capture.site import Unverified

Loss = Callable[[Any, Any], Tensor]


def no_step(share: float) -> None:
    """Tell nobody how far it is."""


@dataclass(frozen=True)
class Task:
    """A model, what it reads, and how it is judged. A method takes one and returns a HeadTable.

    Attributes
    ----------
    model: any torch.nn.Module.
    batches: dicts, tuples or tensors; one pass.
    loss: ``loss(what the model returned, batch)``, a number or one for each sequence; None for methods that
        ask the model alone.
    seed: of all that is drawn.
    keep: how many heads learned gates are to leave open.
    state: a file to go on from, for what takes long.
    unverified: ``"allow"`` to silence heads at sites of which nothing could be proved.
    step: told about progress, in batches.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss | None = None
    seed: int = 0
    keep: int | None = None
    state: Path | None = None
    unverified: Unverified = "refuse"
    step: Callable[[float], None] = no_step
