"""The small language models that studies train: their settings, their data, some held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyheads.data.examples import spread
from manyheads.studies.fitting import Recipe
from manyheads.studies.language_text import opened
from manyheads.studies.study import Settings
from manyheads.training.task import Data, Task

# Sizes of the settings below, for tests and for a full study.
TINY: dict[str, Any] = {
    "seeds": 2, "d_model": 16, "heads": 2, "layers": 1, "context": 16, "steps": 3, "batch_tokens": 64,
}  # fmt: skip
FULL: dict[str, Any] = {
    "seeds": 5, "d_model": 128, "heads": 8, "layers": 4, "context": 128, "steps": 300, "batch_tokens": 1024,
}  # fmt: skip


@dataclass(frozen=True)
class LanguageModel(Settings):
    """A language model and how long it is trained.

    >>> task, data = LanguageModel(**TINY).open()
    >>> task.heads
    2
    """

    d_model: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    steps: int = 250
    batch_tokens: int = 1024

    def open(self) -> tuple[Any, Data]:
        """The task with these sizes, and its data."""
        task, data = opened(self.data, self.context)
        task.d_model, task.layers, task.heads = self.d_model, self.layers, self.heads
        return task, data

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return Recipe(self.steps, self.batch_tokens)


def held_out(task: Task, data: Data, examples: int = 16) -> dict[str, Tensor]:
    """Some held-out examples, evenly spread, as one batch.

    >>> held_out(*LanguageModel(**TINY).open())["ids"].shape
    torch.Size([16, 16])
    """
    return task.collate(data.valid.take(spread(len(data.valid), examples)))
