"""What the loop asks of a task. It knows nothing else about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from manyheads.data.examples import Examples


@dataclass
class Data:
    """Examples to learn from, examples to be measured on, and what a person should know about them."""

    train: Examples
    valid: Examples
    notes: list[str] = field(default_factory=list)


class Task(Protocol):
    """A use of transformers: its data, model, loss, metric and prediction, in one file under tasks/.

    A task is a dataclass: its fields are its options, in Python, on the command line and in config.json.
    Measuring is a map and a reduction, `measure` and `metrics`, so that processes can share it.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the one of `metrics` that decides which weights are the best
    higher_is_better: ClassVar[bool]
    unit: ClassVar[str]  # what `inspect` counts: tokens, or else whole examples by their name, as images
    training: ClassVar[dict[str, Any]]  # options of training that suit this task

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """Read the data, or the embedded default; learns the vocabulary unless `restore` brought one."""

    def read(self, data: str) -> Examples:
        """The part of some data for testing, or all of it, to measure on."""

    def has_test(self, data: str) -> bool:
        """Whether data has a part for testing, which `read` reads."""

    def describe(self) -> dict[str, Any]:
        """The model: ``{"class": "language.masked", "options": {...}}``, by a registered name."""

    def collate(self, examples: list[Any]) -> Any:
        """Examples as one batch of tensors: a dict."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss summed over what is predicted, and how much that is; the loop divides."""

    def measure(self, model: nn.Module, batch: Any) -> Any:
        """What a batch adds to the metrics, without gradients: plain numbers and texts."""

    def metrics(self, parts: list[Any]) -> dict[str, float]:
        """The metrics from what `measure` gave for every batch."""

    def predict(self, model: nn.Module, inputs: list[str], **how: Any) -> list[str]:
        """What the trained model makes of these inputs."""

    def inputs(self, batch: Any) -> dict[str, Any]:
        """What the model takes, by name, of what `collate` made: how `inspect` and the others run it."""

    def save(self, folder: Path) -> None:
        """Write what the task learned from the data, such as a vocabulary."""

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote."""
