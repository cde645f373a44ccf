"""What classification tasks have in common: labels, pooling, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.tasks.architecture import Architecture
from manyheads.training.options import option
from manyheads.training.run_folder import read_config

POOLING = ("first", "mean")
HELD_OUT = 10  # every tenth example, if the data has no validation part
TESTING = ("test", "all", "valid", "train")  # the part to test a model on: the first that exists
Part = TypeVar("Part")


@dataclass(kw_only=True)
class Classification(Architecture):
    """A task whose model returns ``{"logits": (batch, classes)}`` and whose batches have ``labels`` (batch,).

    The names of the classes, which it learns from the data, are an option of its model, ``labels``.

    Examples
    --------
    >>> task = Classification()
    >>> task.numbers(["b", "a", "b"], learn=True), task.labels
    (tensor([1, 0, 1]), ['a', 'b'])
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    pooling: str = option("mean", "Pooling: mean (of all tokens) or first (a class token).")
    label_smoothing: float = option(0.1, "Share of probability that the target leaves to other classes.")

    def __post_init__(self) -> None:
        if self.pooling not in POOLING:
            raise ValueError(f"pooling: expected {' or '.join(POOLING)}, got {self.pooling!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected 0 or more and below 1, got {self.label_smoothing}")
        self.labels: list[str] = []

    def numbers(self, names: Sequence[str], learn: bool = False) -> Tensor:
        """The numbers of these classes, (names,); with ``learn`` they become the labels if there are none."""
        if learn and not self.labels:
            classes = set(names)
            self.labels = sorted(classes, key=lambda name: (not name.isdecimal(), name.zfill(20), name))
            if len(classes) < 2:
                raise ValueError(f"data: all examples are of the class {names[0]!r}; expected two or more")
        numbers = {name: number for number, name in enumerate(self.labels)}
        unknown = sorted(set(names) - set(numbers))
        if unknown:
            labels = ", ".join(self.labels[:20])
            raise ValueError(f"data: the class {unknown[0]!r} is not among those of training: {labels}")
        return torch.tensor([numbers[name] for name in names])

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """All but the labels."""
        return {name: item for name, item in batch.items() if name != "labels"}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the classes in nats, summed; smoothed in training."""
        return self._loss(self.logits(model, batch), batch["labels"], self.label_smoothing)

    def measure(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, int, int]:
        """Loss, number of examples, and number of those classified correctly."""
        logits, labels = self.logits(model, batch), batch["labels"]
        loss, count = self._loss(logits, labels, 0.0)
        return loss.item(), int(count), int((logits.argmax(-1) == labels).sum())

    def metrics(self, parts: list[tuple[float, int, int]]) -> dict[str, float]:
        """Accuracy, and loss per example in nats."""
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        return {"accuracy": right / count, "loss": loss / count}

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The logits of a batch, (batch, classes), in float32."""
        logits: Tensor = model(**self.inputs(batch))["logits"]
        return logits.float()

    def save(self, folder: Path) -> None:
        """Nothing: the classes are in the description of the model."""

    def restore(self, folder: Path) -> None:
        """Read the classes from the description of the model."""
        self.labels = list(read_config(folder)["options"]["labels"])

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        summed = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        return summed, torch.tensor(len(labels), device=labels.device)


def pooled(x: Tensor, lengths: Tensor | None, how: str) -> Tensor:
    """Tokens ``(batch, length, d_model)`` to one vector ``(batch, d_model)``: the first, or the mean.

    >>> x = torch.tensor([[[1.0], [3.0], [torch.nan]]])
    >>> pooled(x, torch.tensor([2]), "mean"), pooled(x, None, "first")
    (tensor([[2.]]), tensor([[1.]]))
    """
    if how == "first":
        return x[:, 0]
    if lengths is None:
        return x.mean(1)
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(padding.unsqueeze(2), 0.0).sum(1) / lengths.unsqueeze(1).to(x.dtype)


def parts_of(
    read: Callable[[str, str], Part | None],
    data: str | None,
    valid: str | None,
    embedded: Callable[[], Part],
) -> tuple[Part, Part | None]:
    """The part to train on and the part to validate on; None for that if neither data nor user has one.

    Parameters
    ----------
    read: gives a part of some data, "train", "valid", "test", or "all" of data without parts; None if there
        is no such part.
    data, valid: what the user named.
    embedded: the default data.
    """
    learned = embedded() if data is None else first_of(read, data, ("train", "all"))
    if valid is not None:
        return learned, first_of(read, valid, ("all", "valid", "test", "train"))
    return learned, None if data is None else read(data, "valid")


def first_of(read: Callable[[str, str], Part | None], data: str, parts: Sequence[str]) -> Part:
    """The first of these parts that the data has."""
    first = next((one for part in parts if (one := read(data, part)) is not None), None)
    if first is None:
        raise ValueError(f"data: {data} has no part called {' or '.join(parts)}; expected one")
    return first


def split_indices(total: int) -> tuple[list[int], list[int]]:
    """Indices to train on and indices held out: every tenth.

    >>> split_indices(11)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [9])
    """
    held = [i for i in range(total) if i % HELD_OUT == HELD_OUT - 1] or [total - 1]
    return sorted(set(range(total)) - set(held)), held
