"""What tasks have in common that name a class: labels, pooling, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.tasks.architecture import Architecture
from manyheads.training.options import option
from manyheads.training.run_folder import read_config

POOLING = ("first", "mean")
HELD_OUT = 10  # every tenth example, where the data has no part for it
TESTING = ("test", "all", "valid", "train")  # which part is read to test a model: the first there is
Found = TypeVar("Found")


@dataclass(kw_only=True)
class Classification(Architecture):
    """A task whose model returns ``{"logits": (batch, classes)}`` and whose batches have ``labels`` (batch,).

    What it learns from the data, the names of the classes, is an option of its model, ``labels``.

    Examples
    --------
    >>> task = Classification()
    >>> task.numbers(["b", "a", "b"], learn=True), task.labels
    (tensor([1, 0, 1]), ['a', 'b'])
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    pooling: str = option("mean", "Where the class is read: mean (of all tokens) or first (one before them).")
    label_smoothing: float = option(0.1, "Share of probability that the target leaves to other classes.")

    def __post_init__(self) -> None:
        if self.pooling not in POOLING:
            raise ValueError(f"pooling: expected {' or '.join(POOLING)}, got {self.pooling!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected from 0 and below 1, got {self.label_smoothing}")
        self.labels: list[str] = []

    def numbers(self, names: Sequence[str], learn: bool = False) -> Tensor:
        """The numbers of these classes, (names,); with ``learn`` they are all there is, unless known."""
        if learn and not self.labels:
            found = set(names)
            self.labels = sorted(found, key=lambda name: (not name.isdecimal(), name.zfill(20), name))
            if len(found) < 2:
                raise ValueError(f"data: all examples are of the class {names[0]!r}; expected two or more")
        places = {name: number for number, name in enumerate(self.labels)}
        unknown = sorted(set(names) - set(places))
        if unknown:
            known = ", ".join(self.labels[:20])
            raise ValueError(f"data: the class {unknown[0]!r} is not among those of training: {known}")
        return torch.tensor([places[name] for name in names])

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """All but the labels."""
        return {name: item for name, item in batch.items() if name != "labels"}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the classes in nats, summed; smoothed in training."""
        return self._loss(self.logits(model, batch), batch["labels"], self.label_smoothing)

    def measure(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, int, int]:
        """Loss, examples, and how many of them were named rightly."""
        logits, labels = self.logits(model, batch), batch["labels"]
        loss, count = self._loss(logits, labels, 0.0)
        return loss.item(), int(count), int((logits.argmax(-1) == labels).sum())

    def metrics(self, parts: list[tuple[float, int, int]]) -> dict[str, float]:
        """The share of examples named rightly, and the loss of one in nats."""
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        return {"accuracy": right / count, "loss": loss / count}

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """What the model says about a batch, (batch, classes), in float32."""
        found: Tensor = model(**self.inputs(batch))["logits"]
        return found.float()

    def save(self, folder: Path) -> None:
        """Nothing: the classes stand in the description of the model."""

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
    read: Callable[[str, str], Found | None],
    data: str | None,
    valid: str | None,
    embedded: Callable[[], Found],
) -> tuple[Found, Found | None]:
    """What there is to learn from, and what to measure on; None for that where nobody says what it is.

    Parameters
    ----------
    read: gives a part of some data, "train", "valid", "test", or "all" of data without parts; None if there
        is no such part.
    data, valid: as people name them.
    embedded: what there is without any.
    """
    learned = embedded() if data is None else first_of(read, data, ("train", "all"))
    if valid is not None:
        return learned, first_of(read, valid, ("all", "valid", "test", "train"))
    return learned, None if data is None else read(data, "valid")


def first_of(read: Callable[[str, str], Found | None], data: str, parts: Sequence[str]) -> Found:
    """The first of these parts that the data has."""
    found = next((one for part in parts if (one := read(data, part)) is not None), None)
    if found is None:
        raise ValueError(f"data: {data} has no part called {' or '.join(parts)}; expected one")
    return found


def parted(total: int) -> tuple[list[int], list[int]]:
    """Places to learn from and places held out: every tenth.

    >>> parted(11)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [9])
    """
    held = [i for i in range(total) if i % HELD_OUT == HELD_OUT - 1] or [total - 1]
    kept = set(held)
    return [i for i in range(total) if i not in kept], held
