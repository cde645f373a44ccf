"""What every method of importance is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyheads.capture.site import Unverified
from manyheads.common.progress import Progress, count_of, no_progress

Loss = Callable[[Any, Any], Tensor]


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
    gates: how many heads the method ``gates`` leaves open.
    state: a file to go on from, for what takes long.
    unverified: ``"allow"`` to silence heads at sites of which nothing could be proved.
    progress: called as batches are done.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss | None = None
    seed: int = 0
    gates: int | None = None
    state: Path | None = None
    unverified: Unverified = "refuse"
    progress: Progress = no_progress

    def report(self, method: str, batches: float) -> None:
        """Call ``progress`` with the number of batches that are done."""
        self.progress(method, batches, count_of(self.batches))
