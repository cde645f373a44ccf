"""The protocol of a task: all that the training loop knows about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from manyheads.data.examples import Example, Examples
from manyheads.models.config import ModelDescription


@dataclass
class Data:
    """Examples to train on, examples to validate on, and notes about them for the user."""

    train: Examples
    valid: Examples
    notes: list[str] = field(default_factory=list)


class Task(Protocol):
    """A use of transformers: its data, model, loss, metric and prediction, in one file under tasks/.

    A task is a dataclass: its fields are its options, in Python, on the command line and in config.json.
    Evaluation is a map and a reduction, `measure` and `metrics`, so that processes can share it.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the one of `metrics` by which the best weights are chosen
    higher_is_better: ClassVar[bool]
    unit: ClassVar[str]  # what `inspect` counts: tokens, or examples by their name, as images
    training: ClassVar[Mapping[str, float | str]]  # options of training that suit this task

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """Read the data, or the embedded default; learns the vocabulary unless `restore` read one."""

    def read(self, data: str) -> Examples:
        """The examples of the test part of some data, or of all of it."""

    def has_test(self, data: str) -> bool:
        """Whether some data has a test part, which `read` reads."""

    def describe(self) -> ModelDescription:
        """The model: ``{"class": "language.masked", "options": {...}}``, by a registered name."""

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Examples as one batch."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss, summed over the predictions, and the number of these; the loop divides."""

    def measure(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        """What a batch adds to the metrics, without gradients: plain numbers and texts."""

    def metrics(self, parts: list[Any]) -> dict[str, float]:
        """The metrics, from the results of `measure` for all batches."""

    def predict(self, model: nn.Module, inputs: list[str], **options: Any) -> list[str]:
        """The output of the trained model for each input."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The arguments of the model, from a batch of `collate`: `inspect` and the others run it on them."""

    def save(self, folder: Path) -> None:
        """Write what the task learned from the data, such as a vocabulary."""

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote."""
