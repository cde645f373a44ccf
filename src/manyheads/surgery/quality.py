"""quality: how good a cut model is compared with the uncut one, in a familiar unit, with its uncertainty.

Every number comes from held-out sequences, so it has a standard error over them; the change from one model to
the other is paired by sequence, so that what both find hard cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.common.intervals import student
from manyheads.common.labelled_batch import LabelledBatch, without_labels
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.importance.losses import causal, fitting, units
from manyheads.heads.model_outputs import Output, main_tensor, output_distance, read_output
from manyheads.heads.observer import observed


@dataclass(frozen=True)
class Estimate:
    """A quality, and its standard error over sequences (nan for fewer than two)."""

    value: float
    se: float


@dataclass(frozen=True)
class QualityChange:
    """From one model to another, on the same sequences, with standard error and 95% interval.

    For perplexity it is the factor by which it grows, for all else the difference.
    """

    value: float
    se: float
    low: float
    high: float
    factor: bool

    @property
    def within_noise(self) -> bool:
        """Whether the interval includes no change."""
        return not (self.low > self.factor or self.high < self.factor)


@dataclass(frozen=True)
class Compared:
    """Two models on the same sequences.

    measure: that of their task, for batches of `labelled`; "perplexity" for models that predict next tokens;
        "accuracy" for classes where the batches have ``labels``; "agreement", the share of the uncut model's
        choices that stay, for classes and tokens without; "squared change" from the uncut model's output for
        amounts (regression); "cosine" with the uncut model's output for embeddings.
    """

    measure: str
    before: Estimate
    after: Estimate
    change: QualityChange
    sequences: int

    @property
    def change_se(self) -> float:
        """The standard error of the change, in the unit of quality."""
        return self.change.se * (self.before.value if self.change.factor else 1.0)


def compare_quality(model: nn.Module, small: nn.Module, batches: Iterable[Batch]) -> Compared:
    """Compare a cut model with the uncut one.

    Parameters
    ----------
    model, small: the uncut and the cut model, in eval mode.
    batches: dicts, tuples or tensors on the models' device; ``labels`` (batch,) in a dict are right classes.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> quality = compare_quality(model, model, [torch.randint(17, (3, 5))])
    >>> quality.measure, quality.sequences, round(quality.after.value, 5)
    ('cosine', 3, 1.0)
    """
    measure = ""
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    with torch.no_grad(), observed(model) as observer:
        for batch in batches:
            inputs = without_labels(batch)
            full = observer.forward(inputs)
            other = read_output(run(small, inputs), small, full.real)
            measure = measure or measure_of(full.result, model, observer.sites, batch)
            for part, output in zip(parts, (full.output, other), strict=True):
                part.append(scores(measure, full.output, output, batch))
    return compared(measure, torch.cat(parts[0]), torch.cat(parts[1]))


def compared(measure: str, before: Tensor, after: Tensor) -> Compared:
    """Two models by their `scores` on the same sequences, (sequences, 2) each."""
    first, second = (estimate(measure, one) for one in (before, after))
    if measure in ("agreement", "cosine", "squared change"):  # with itself: one or none by definition
        first = Estimate(first.value, 0.0)
    return Compared(measure, first, second, quality_change(measure, before, after), len(before))


def measure_of(result: object, model: nn.Module, sites: Iterable[Site], batch: Batch) -> str:
    """The measure of quality that fits a model's output for a batch: see `Compared`.

    >>> measure_of({"logits": torch.zeros(2, 3)}, nn.Identity(), [], {"labels": torch.tensor([0, 2])})
    'accuracy'
    >>> measure_of({"logits": torch.zeros(2, 3)}, nn.Identity(), [], torch.zeros(2, 5))
    'agreement'
    """
    if isinstance(batch, LabelledBatch):
        return batch.task.measure
    output = read_output(result, model)
    if output.amounts:
        return "squared change"
    if fitting(result, model, sites) is causal:
        return "perplexity"
    value = main_tensor(result)[1]
    if value.dim() == 2 and _classes(batch, len(value)) is not None:
        return "accuracy"
    return "cosine" if output.real is None else "agreement"


def scores(measure: str, full: Output, other: Output, batch: Batch) -> Tensor:
    """The score of each sequence of a batch, and its weight: (batch, 2) in float64.

    Parameters
    ----------
    measure: as `measure_of` finds it.
    full, other: what the uncut model gives for the batch, and what the model gives that is judged.
    """
    if isinstance(batch, LabelledBatch):
        return batch.task.scores(other.named, batch)
    if measure == "perplexity":
        value = units(causal, {"logits": other.value}, without_labels(batch))
        count = _next_tokens(other.value, full.real)
    elif measure == "accuracy":
        labels = _classes(batch, len(other.value))
        assert labels is not None
        value = other.value.flatten(1).argmax(-1) == labels.to(other.value.device)
        count = torch.ones_like(value)
    elif measure == "agreement":
        assert full.real is not None
        same = (full.value.argmax(-1) == other.value.argmax(-1)) & full.real
        count = full.real.sum(1)
        value = same.sum(1) / count.clamp(min=1)
    elif measure == "squared change":
        value = 2 * output_distance(full, other)
        count = torch.ones_like(value)
    else:
        value = 1 - output_distance(full, other)
        count = torch.ones_like(value)
    return torch.stack([value.double().cpu(), count.double().cpu()], 1)


def estimate(measure: str, scored: Tensor) -> Estimate:
    """The quality from scores (sequences, 2), with its standard error.

    >>> estimate("accuracy", torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]).double())
    Estimate(value=0.75, se=0.25)
    """
    mean, error = _weighted(scored[:, 0], scored[:, 1])
    error = _at_least(measure, error, len(scored))
    if measure == "perplexity":
        mean = math.exp(min(mean, 700.0))
        error *= mean
    return Estimate(mean, error)


def quality_change(measure: str, before: Tensor, after: Tensor) -> QualityChange:
    """From one model's scores (sequences, 2) to another's, on the same sequences."""
    mean, error = _weighted(after[:, 0] - before[:, 0], before[:, 1])
    error = _at_least(measure, error, len(before))
    half = student(len(before) - 1) * error
    if measure != "perplexity":
        return QualityChange(mean, error, mean - half, mean + half, factor=False)
    value, low, high = (math.exp(min(end, 700.0)) for end in (mean, mean - half, mean + half))
    return QualityChange(value, value * error, low, high, factor=True)


def _weighted(values: Tensor, counts: Tensor) -> tuple[float, float]:
    """A weighted mean, and its standard error over sequences: that of a ratio of two sums."""
    total = counts.sum()
    mean = (values * counts).sum() / total
    n = len(values)
    if n < 2:
        return mean.item(), math.nan
    spread = (counts * (values - mean)).pow(2).sum() * n / (n - 1)
    return mean.item(), (spread.sqrt() / total).item()


def _at_least(measure: str, error: float, sequences: int) -> float:
    """A standard error; where all choices are alike, that of Agresti and Coull (1998), two more of each.

    Six right answers of six do not prove that the seventh is right.
    """
    if measure not in ("accuracy", "agreement", "exact match") or error != 0.0:
        return error
    share = 2 / (sequences + 4)
    return math.sqrt(share * (1 - share) / (sequences + 4))


def _classes(batch: Batch, size: int) -> Tensor | None:
    """The right class of each sequence in a batch, (batch,), where it has them."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    fits = isinstance(labels, Tensor) and labels.shape == (size,) and not labels.is_floating_point()
    return labels if fits else None


def _next_tokens(logits: Tensor, real: Tensor | None) -> Tensor:
    """How many tokens of each sequence are predicted, by logits (batch, length, vocabulary)."""
    lengths = torch.full((logits.shape[0],), logits.shape[1]) if real is None else real.sum(1)
    return (lengths - 1).clamp(min=0)
