"""silencing_curve: the quality of a model as heads are silenced, by a ranking and at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import nn

from manyheads.common.json_numbers import plain
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.heads.importance import importance
from manyheads.heads.observer import Observer, observed
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import unverified_heads
from manyheads.surgery.plan import plan
from manyheads.surgery.quality import compared, measure_of, scores

SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
DRAWS = 2


class Line(TypedDict):
    """The quality for one ranking: by the share of heads kept, with its standard error."""

    name: str
    kept: list[float]
    mean: list[float | None]
    se: list[float | None]


class SilencingCurve(TypedDict):
    """What the page draws: the measure of quality, on how many sequences, and a line for each ranking."""

    quality: str
    sequences: int
    lines: list[Line]


def silencing_curve(
    model: nn.Module,
    batches: Sequence[Batch],
    rankings: Mapping[str, HeadTable],
    *,
    progress: Progress = no_progress,
) -> SilencingCurve:
    """Silence more and more heads, the least important first, and random ones as the control.

    Quality is perplexity for a model that predicts next tokens, the share of its choices that stay for other
    logits, else the cosine to the full model's output; errors are those of the change over ``sequences``. The
    sets are those of `plan`, which could be cut: heads that share keys go a group at a time, and each line
    says how many heads are ``kept``. Heads at sites that are not verified stay. Nothing is
    refitted: `manyheads prune` gets further.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> batches = [torch.randint(17, (3, 5))]
    >>> measured = silencing_curve(model, batches, {"fisher": importance(model, batches)})
    >>> measured["quality"], [line["name"] for line in measured["lines"]], measured["lines"][0]["mean"][0]
    ('cosine', ['fisher', 'random'], 1.0)
    """
    drawn = [importance(model, batches[:1], "random", seed=seed) for seed in range(DRAWS)]
    ways = [(name, table) for name, table in rankings.items()] + [("random", table) for table in drawn]
    points_by_name: dict[str, list[list[tuple[float, float, float]]]] = {}
    with observed(model) as observer:
        judge = _Judge(observer, batches)
        for number, (name, table) in enumerate(ways):
            points: list[tuple[float, float, float]] = []
            for share in SHARES:
                removed = _removed(table, share)
                kept = 1 - sum(map(len, removed.values())) / len(table)
                points.append((kept, *judge.without(removed)))
                progress("curve", number * len(SHARES) + len(points), len(ways) * len(SHARES))
            points_by_name.setdefault(name, []).append(points)
    lines = [_line(name, each) for name, each in points_by_name.items()]
    return {"quality": judge.measure, "sequences": judge.sequences, "lines": lines}


def _removed(table: HeadTable, keep: float) -> Mapping[str, list[int]]:
    try:
        return plan(table, keep, protect=unverified_heads(table)).heads if keep < 1 else {}
    except ValueError:  # fewer heads than that cannot go: then none does
        return {}


def _line(name: str, draws: list[list[tuple[float, float, float]]]) -> Line:
    """The mean over several draws (draws, points, 3) of kept, quality and its error; same kept, one point.

    The error has what sequences leave open and, for several draws, what the draws do.
    """
    values = torch.tensor(draws, dtype=torch.float64)
    kept = [round(share, 4) for share in values[..., 0].mean(0).tolist()]
    first = [i for i in range(len(kept)) if i == 0 or kept[i] < kept[i - 1]]
    chosen = values[:, first]
    variance = chosen[..., 2].pow(2).mean(0)
    if len(draws) > 1:
        variance = variance + chosen[..., 1].var(0) / len(draws)
    return {
        "name": name,
        "kept": [kept[i] for i in first],
        "mean": plain(chosen[..., 1].mean(0)),
        "se": plain(variance.sqrt()),
    }


class _Judge:
    """The quality of a model without some heads, against the full one."""

    def __init__(self, observer: Observer, batches: Sequence[Batch]) -> None:
        self._observer = observer
        self._full = [(batch, observer.forward(batch)) for batch in batches]
        first, full = self._full[0]
        self.measure = measure_of(full.result, observer.model, observer.sites, first)
        self._scores = torch.cat([scores(self.measure, o.output, o.output, batch) for batch, o in self._full])
        self.sequences = len(self._scores)

    def without(self, heads: Mapping[str, list[int]]) -> tuple[float, float]:
        """The quality when these heads are silenced, and the standard error of its change."""
        if not heads:
            return compared(self.measure, self._scores, self._scores).after.value, 0.0
        sizes = {site.name: site.heads for site in self._observer.sites}
        gates = {site: torch.ones(sizes[site]) for site in heads}
        for site, numbers in heads.items():
            gates[site][numbers] = 0.0
        parts = []
        for batch, full in self._full:
            other = self._observer.output(self._observer.gated(batch, gates), full)
            parts.append(scores(self.measure, full.output, other, batch))
        judged = compared(self.measure, self._scores, torch.cat(parts))
        return judged.after.value, judged.change_se
