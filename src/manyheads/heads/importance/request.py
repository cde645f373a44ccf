"""The arguments of every method of importance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyheads.capture.site import Unverified
from manyheads.common.progress import Progress, count_of, no_progress
from manyheads.common.types import Batch

# What the model returned and the batch, to a number or one for each sequence.
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Request:
    """A model, its batches and a loss. A method takes one and returns a HeadTable.

    Attributes
    ----------
    model: any torch.nn.Module.
    batches: dicts, tuples or tensors; one pass.
    loss: ``loss(what the model returned, batch)``, a number or one for each sequence; None for methods that
        need none.
    seed: of all random numbers.
    gates: how many heads the method ``gates`` leaves open.
    state: a file to resume from, for slow methods.
    unverified: ``"allow"`` to silence heads at unverified sites.
    memory: the bytes that a method may take beside the pass itself, as `memory_budget` reads them.
    progress: called as batches are done.
    """

    model: nn.Module
    batches: Iterable[Batch]
    loss: Loss | None = None
    seed: int = 0
    gates: int | None = None
    state: Path | None = None
    unverified: Unverified = "refuse"
    memory: str | int | None = None
    progress: Progress = no_progress

    def report(self, method: str, batches: float) -> None:
        """Call ``progress`` with the number of batches that are done."""
        self.progress(method, batches, count_of(self.batches))
