"""compare: which heads of a model do something else in another model, or on another text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor, nn

from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.heads.comparison.batch_means import BatchMeans, run_both
from manyheads.heads.comparison.matching import Match, matched_heads, spread_over_heads
from manyheads.heads.table import METRICS, HeadTable

# A change that is smaller than this part of the spread between heads does not count, however certain.
LEAST_CHANGE = 0.05
LEAST_SPREAD = 1e-6  # a metric that is the same for all heads still has a unit
# The metrics that are tested: one for each property of attention, and the length of the output.
TESTED = (
    "entropy", "confidence", "distance", "self", "previous", "next", "first", "special", "rare",
    "output_norm",
)  # fmt: skip


class Change(NamedTuple):
    """A metric of one head on both sides, the mean over batches; ``q`` is the p-value of the change after
    false discovery control.
    """

    metric: str
    before: float
    after: float
    change: float
    se: float
    q: float


@dataclass(eq=False)
class Comparison:
    """Two models, or one model on two texts, side by side.

    Attributes
    ----------
    before, after: the tables of both.
    pairs: rows of ``before`` and of ``after`` that are the same head.
    changes: a row for each pair, named as in ``before``: ``attention``, the Jensen-Shannon distance between
        what the two attend to (0 the same, 1 nothing in common; absent unless both read the same tokens), and
        the change of each metric, as ``entropy_change``, with standard errors over batches; ``matched`` is
        the head in ``after``, ``moved`` yes or no, "" where one batch gives no error.
    q: for each tested metric the q-value of each pair's change.
    batches: how many on either side; paired: whether they are the same ones.
    rate: the false discovery rate that ``moved`` keeps.
    means: of each metric, the mean over batches on both sides, (pairs,) each.
    match: how the heads were matched.
    """

    before: HeadTable
    after: HeadTable
    pairs: list[tuple[int, int]]
    changes: HeadTable
    q: dict[str, Tensor]
    batches: tuple[int, int]
    paired: bool
    rate: float
    means: dict[str, tuple[Tensor, Tensor]] = field(repr=False)
    match: Match = "function"

    def moved(self) -> list[int]:
        """The rows of ``changes`` whose head moved, the one that moved most first: by ``attention``, or by
        the largest change in units of the spread between heads.
        """
        size = self.size().tolist()
        rows = [i for i, word in enumerate(self.changes["moved"]) if word == "yes"]
        return sorted(rows, key=lambda i: -size[i])

    def size(self) -> Tensor:
        """How far each head moved, (pairs,): ``attention``, or without it the largest change in spreads."""
        if "attention" in self.changes.sums:
            column: Tensor = self.changes["attention"]
            return column
        scaled = [
            self.changes[f"{name}_change"].abs() / spread_over_heads(self.before[name], LEAST_SPREAD)
            for name in self.q
        ]
        return torch.stack(scaled).nan_to_num(0.0).amax(0)

    def of(self, row: int) -> list[Change]:
        """The tested changes of one row, the most certain first."""
        changes = [
            Change(
                name, float(self.means[name][0][row]), float(self.means[name][1][row]),
                float(self.changes[f"{name}_change"][row]), float(self.changes[f"{name}_change_se"][row]),
                float(q[row]),
            )
            for name, q in self.q.items()
        ]  # fmt: skip
        spreads = {name: float(spread_over_heads(self.before[name], LEAST_SPREAD)) for name in self.q}
        size = {each.metric: abs(each.change) / spreads[each.metric] for each in changes}
        return sorted(changes, key=lambda each: (not each.q < self.rate, -size[each.metric], each.metric))

    def __repr__(self) -> str:
        tested = sum(word != "" for word in self.changes["moved"])
        return (
            f"Comparison({len(self.pairs)} heads matched of {len(self.before)} and {len(self.after)}, "
            f"{len(self.moved())} of {tested} tested moved)"
        )


def compare(
    model: nn.Module,
    other: nn.Module,
    batches: Iterable[Batch],
    other_batches: Iterable[Batch] | None = None,
    *,
    paired: bool | None = None,
    tokens: Mapping[str, Iterable[int]] | None = None,
    match: Match = "function",
    rows: int = 64,
    rate: float = 0.05,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Comparison:
    """Which heads moved: a fine-tune against its base, cut against uncut, or two texts on one model.

    Heads are matched by what they do: the assignment with the least total distance between their profiles
    and, where both models read the same tokens, between their attention. A change is tested against the
    smallest change that counts, a twentieth of the spread between heads, and all tests together keep a false
    discovery rate whatever their dependence.

    Parameters
    ----------
    model, other: the two models; the same one twice to compare texts.
    batches: dicts, tuples or tensors. Each counts once in standard errors, so small ones are better: one
        sequence each. Padding does not count.
    other_batches: what ``other`` reads; the same as ``model`` by default.
    paired: whether batch number i is the same text on both sides: then the changes of each text are tested,
        which is far sharper. Default: whether ``other_batches`` were left out.
    tokens: token ids by name, as in `watch`.
    match: ``"function"``, or ``"number"`` for heads with the same site and number (before cuts).
    rows: queries of each batch on which attention is compared.
    rate: the false discovery rate: among the heads said to have moved, the share that did so by chance.
    seed: of the sampled queries.
    progress: called after each batch.

    Returns
    -------
    Comparison: ``pairs``, ``changes`` (a HeadTable), ``moved()``.

    See Also
    --------
    card: what a cut costs and saves.
    diversity: compares the heads of one model with each other.

    References
    ----------
    Benjamini, Yekutieli, "The control of the false discovery rate in multiple testing under dependency"
    (2001).
    Kuhn, "The Hungarian method for the assignment problem" (1955).

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> torch.manual_seed(0) and None
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> batches = [torch.randint(17, (1, 7)) for _ in range(5)]
    >>> compare(model, model, batches)
    Comparison(4 heads matched of 4 and 4, 0 of 4 tested moved)
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate: got {rate}; expected a share between 0 and 1")
    if match not in ("function", "number"):
        raise ValueError(f"match: got {match!r}; expected 'function' or 'number'")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows: got {rows!r}; expected a number of queries, at least 1")
    first = list(batches)
    second = first if other_batches is None else list(other_batches)
    paired = other_batches is None if paired is None else paired
    if not first or not second:
        raise ValueError("batches: expected at least one on each side, got none")
    if paired and len(first) != len(second):
        raise ValueError(
            f"paired: got {len(first)} batches and {len(second)}; expected equal numbers, the same texts in "
            "the same order, or paired=False"
        )
    side, other_side, distances = run_both(
        (model, other), (first, second), tokens, rows=rows, seed=seed, progress=progress
    )
    distance = None if distances is None else distances.nanmean(0)
    pairs = matched_heads(side.table, other_side.table, distance, match)
    if not pairs:
        raise ValueError(
            "compare: no head of one model can be matched with one of the other: "
            "their kinds of attention differ"
        )
    return replace(_compare_heads(side, other_side, pairs, distances, paired, rate), match=match)


def _compare_heads(
    side: BatchMeans,
    other: BatchMeans,
    pairs: list[tuple[int, int]],
    distances: Tensor | None,
    paired: bool,
    rate: float,
) -> Comparison:
    rows, columns = (list(each) for each in zip(*pairs, strict=True))
    metrics = [name for name in side.means if name in other.means and name in (*METRICS, *side.table.sums)]
    tested = [name for name in TESTED if name in metrics]
    sums: dict[str, Tensor] = {}
    if distances is not None:
        sums["attention"] = _sums(distances[:, rows, columns])
    p_values: dict[str, Tensor] = {}
    means: dict[str, tuple[Tensor, Tensor]] = {}
    for name in metrics:
        before, after = side.means[name][:, rows], other.means[name][:, columns]
        means[name] = before.nanmean(0), after.nanmean(0)
        if paired:
            sums[f"{name}_change"] = _sums(after - before)
            mean, error, freedom = _estimate(after - before)
        else:
            mean, error, freedom = _welch(before, after)
            count = torch.where(error.isnan(), 1, len(before) + len(after)).double()  # 1: no error
            squares = count * (count - 1) * error.square().nan_to_num(0.0) + count * mean.square()
            sums[f"{name}_change"] = torch.stack([count, count * mean, squares])
        if name in tested:
            least = LEAST_CHANGE * spread_over_heads(side.table[name], LEAST_SPREAD)
            p_values[name] = _p_value(mean, error, freedom, least)
    q = _false_discovery(p_values)
    smallest = torch.stack([value.nan_to_num(math.inf) for value in q.values()]).amin(0).tolist()
    names = [f"{row.layer}.{row.head}" for row in (other.table.rows[j] for j in columns)]
    labels = {
        "matched": names,
        "moved": ["" if value == math.inf else "yes" if value < rate else "no" for value in smallest],
    }
    tokens = side.table.tokens[rows]
    chosen = [side.table.rows[i] for i in rows]
    changes = HeadTable(chosen, tokens, sums, side.table.model, labels=labels)
    batches = len(side), len(other)
    return Comparison(side.table, other.table, pairs, changes, q, batches, paired, rate, means)


def _sums(values: Tensor) -> Tensor:
    """Count, sum and sum of squares over batches, (3, heads), of values (batches, heads)."""
    counted = values.isfinite()
    values = values.nan_to_num(0.0)
    return torch.stack([counted.sum(0).double(), values.sum(0), values.square().sum(0)])


def _estimate(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard error and degrees of freedom of values (batches, heads); NaN for a single batch."""
    count = values.isfinite().sum(0).double()
    mean = values.nanmean(0)
    variance = (values - mean).square().nansum(0) / (count - 1)
    return mean, torch.where(count > 1, (variance / count).sqrt(), math.nan), count - 1


def _welch(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The difference of two means, its standard error, and Welch's degrees of freedom."""
    (mean, error, freedom), (other_mean, other_error, other_freedom) = _estimate(before), _estimate(after)
    total = error.square() + other_error.square()
    parts = error**4 / freedom + other_error**4 / other_freedom
    return other_mean - mean, total.sqrt(), torch.where(parts > 0, total.square() / parts, freedom)


def _p_value(mean: Tensor, error: Tensor, freedom: Tensor, least: Tensor) -> Tensor:
    """How likely a change this large is, if the true one is ``least`` at most; Student's t, two-sided."""
    size = mean.abs()
    certain = (size <= least).double()  # without any variation
    tails = [
        torch.as_tensor(stats.t.sf(((size + sign * least) / error).numpy(), freedom.clamp(min=1).numpy()))
        for sign in (-1, 1)
    ]
    value = torch.where(error > 0, (tails[0] + tails[1]).clamp(max=1.0), certain)
    return torch.where(error.isnan() | mean.isnan(), math.nan, value)


def _false_discovery(p_values: dict[str, Tensor]) -> dict[str, Tensor]:
    """q-values of all tests together, valid under any dependence; NaN stays NaN."""
    values = torch.stack(list(p_values.values()))
    q = torch.full_like(values, math.nan)
    finite = values.isfinite()
    if finite.any():
        q[finite] = torch.as_tensor(stats.false_discovery_control(values[finite].numpy(), method="by"))
    return dict(zip(p_values, q, strict=True))
