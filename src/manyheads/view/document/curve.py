"""The prune curve: what is left of a model's quality as heads are silenced, by a ranking and at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyheads.heads.importance import importance
from manyheads.heads.importance.losses import causal, fitting, units
from manyheads.heads.importance.observe import Observer, observed
from manyheads.heads.importance.outputs import difference
from manyheads.heads.table import HeadTable
from manyheads.surgery.card import _next_tokens
from manyheads.surgery.plan import plan
from manyheads.view.document.packed import plain

SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
DRAWS = 3


def curve(
    model: nn.Module,
    batches: Sequence[Any],
    rankings: Mapping[str, HeadTable],
    *,
    step: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Silence more and more heads, the least important first, and random ones as the control.

    Quality is perplexity for a model that predicts next tokens, else the cosine to the full model's output
    (for logits: 1 - the divergence in nats). The sets are those of `plan`, which could be cut: heads that
    share keys go a group at a time, and each line says how many heads are ``kept``. Nothing is refitted:
    `manyheads prune` gets further.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> batches = [torch.randint(17, (3, 5))]
    >>> found = curve(model, batches, {"fisher": importance(model, batches)})
    >>> found["quality"], [line["name"] for line in found["lines"]], found["lines"][0]["mean"][0]
    ('cosine', ['fisher', 'random'], 1.0)
    """
    drawn = [importance(model, batches[:1], "random", seed=seed) for seed in range(DRAWS)]
    ways = [(name, table) for name, table in rankings.items()] + [("random", table) for table in drawn]
    found: dict[str, list[list[tuple[float, float]]]] = {}
    with observed(model) as observer:
        judge = _Judge(observer, batches)
        for number, (name, table) in enumerate(ways):
            points: list[tuple[float, float]] = []
            for share in SHARES:
                removed = _removed(table, share)
                kept = 1 - sum(map(len, removed.values())) / len(table)
                points.append((kept, judge.without(removed)))
                step((number + len(points) / len(SHARES)) / len(ways))
            found.setdefault(name, []).append(points)
    return {"quality": judge.measure, "lines": [_line(name, each) for name, each in found.items()]}


def _removed(table: HeadTable, keep: float) -> Mapping[str, list[int]]:
    try:
        return plan(table, keep).heads if keep < 1 else {}
    except ValueError:  # fewer heads than that cannot go: then none does
        return {}


def _line(name: str, draws: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """The mean over several draws, (draws, points, kept and quality); points that keep the same are one."""
    values = torch.tensor(draws, dtype=torch.float64)
    kept = [round(share, 4) for share in values[..., 0].mean(0).tolist()]
    first = [i for i in range(len(kept)) if i == 0 or kept[i] < kept[i - 1]]
    line = {"name": name, "kept": [kept[i] for i in first], "mean": plain(values[:, first, 1].mean(0))}
    if len(draws) > 1:
        line["se"] = plain(values[:, first, 1].std(0) / math.sqrt(len(draws)))
    return line


class _Judge:
    """The quality of a model without some heads, against the full one."""

    def __init__(self, observer: Observer, batches: Sequence[Any]) -> None:
        self._observer = observer
        self._full = [(batch, observer.forward(batch)) for batch in batches]
        language = fitting(self._full[0][1].result, observer.model, observer.sites) is causal
        self.measure = "perplexity" if language else "cosine"

    def without(self, heads: Mapping[str, list[int]]) -> float:
        """The quality when these heads are silenced."""
        sizes = {site.name: site.heads for site in self._observer.sites}
        gates = {site: torch.ones(sizes[site]) for site in heads}
        for site, numbers in heads.items():
            gates[site][numbers] = 0.0
        total = weight = 0.0
        for batch, full in self._full:
            result = self._observer.gated(batch, gates)
            if self.measure == "perplexity":
                value = units(causal, result, batch).double().cpu()
                count = _next_tokens(full.output.value, full.real).to(value)
            else:
                value = 1 - difference(full.output, self._observer.output(result, full)).cpu()
                count = torch.ones_like(value)
            total += float((value * count).sum())
            weight += float(count.sum())
        mean = total / weight
        return math.exp(min(mean, 700.0)) if self.measure == "perplexity" else mean
