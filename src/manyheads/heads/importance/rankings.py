"""Whether two rankings of heads agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.heads.table import HeadTable


class Agreement(NamedTuple):
    """The rank correlation of two tables, with the 95% interval that heads like these would give."""

    first: str
    second: str
    spearman: float
    low: float
    high: float
    heads: int


def agreement(tables: Mapping[str, HeadTable], column: str = "importance") -> list[Agreement]:
    """Spearman's rank correlation between each pair of tables, over the heads that both rank.

    A model inside another one has the same heads: ``encoder.layer.0`` of a base model is
    ``bert.encoder.layer.0`` of one fine-tuned from it. Tables without a head in common raise a ValueError.

    The interval treats the heads as a sample: atanh(r) is about normal with the variance (1 + r^2 / 2) / (n -
    3) (Bonett and Wright 2000). Without at least four heads, or when one table ranks nothing, it is nan.

    Parameters
    ----------
    tables: by the name that each has in the result.
    column: which column is ranked.

    See Also
    --------
    importance: makes the tables.

    References
    ----------
    Spearman, "The proof and measurement of association between two things" (1904).
    Bonett, Wright, "Sample size requirements for estimating Pearson, Kendall and Spearman correlations"
    (2000).

    Examples
    --------
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("attn", 0, head, head, head, "self") for head in range(5)]
    >>> def table(*values):
    ...     one, x = torch.ones(5), torch.tensor(values)
    ...     return HeadTable(rows, one, {"importance": torch.stack([one, x, x * x])})
    >>> found = agreement({"a": table(1.0, 2.0, 3.0, 4.0, 5.0), "b": table(2.0, 1.0, 3.0, 4.0, 9.0)})
    >>> found[0].first, found[0].second, round(found[0].spearman, 3), found[0].heads
    ('a', 'b', 0.9, 5)
    """
    if len(tables) < 2:
        raise ValueError(f"tables: expected at least two to compare, got {len(tables)}")
    agreements = []
    for (first, a), (second, b) in combinations(tables.items(), 2):
        a_sites, b_sites = _common_names([row.site for row in a.rows], [row.site for row in b.rows])
        second_values = {
            (site, row.head): value
            for site, row, value in zip(b_sites, b.rows, b[column].tolist(), strict=True)
        }
        pairs = [
            (value, second_values[site, row.head])
            for site, row, value in zip(a_sites, a.rows, a[column].tolist(), strict=True)
            if (site, row.head) in second_values
        ]
        if not pairs:
            raise ValueError(
                f"tables: {first!r} and {second!r} have no head in common: one has {_heads_text(a)}, the "
                f"other {_heads_text(b)}; expected tables of one model, or of two with the same heads"
            )
        pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
        agreements.append(Agreement(first, second, *_interval(pairs), len(pairs)))
    return agreements


def _common_names(first: list[str], second: list[str]) -> tuple[list[str], list[str]]:
    """The sites of two models by common names, where one model is a part of the other.

    >>> _common_names(["layer.0"], ["bert.layer.0"])
    (['layer.0'], ['layer.0'])
    """
    if not set(first) & set(second):
        for one, other in ((first, second), (second, first)):
            prefixes = {name.removesuffix(one[0]) for name in other if name.endswith(f".{one[0]}")}
            for prefix in sorted(prefixes):
                if {prefix + name for name in one} & set(other):
                    return [n.removeprefix(prefix) for n in first], [n.removeprefix(prefix) for n in second]
    return first, second


def _heads_text(table: HeadTable) -> str:
    names = list(dict.fromkeys(row.site for row in table.rows))
    return f"{names[0]!r}{f' and {len(names) - 1} more sites' if len(names) > 1 else ''}" if names else "none"


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation of two vectors (n,); equal values share their mean rank.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 9.0])), 6)
    1.0
    """
    from scipy.stats import spearmanr

    if min(len(a.unique()), len(b.unique())) < 2:
        return math.nan
    return float(spearmanr(a.numpy(), b.numpy()).statistic)


def _interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    if len(pairs) < 4:
        return math.nan, math.nan, math.nan
    a, b = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    r = spearman(a, b)
    if math.isnan(r):
        return r, r, r
    n = len(pairs)
    within = 1 - 6 / (n * (n * n - 1))  # half a step from perfect: one is no certainty
    half = 1.959964 * math.sqrt((1 + r * r / 2) / (n - 3))
    centre = math.atanh(max(-within, min(within, r)))
    return r, math.tanh(centre - half), math.tanh(centre + half)
