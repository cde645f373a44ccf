"""Whether two ways to rank heads agree."""

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
    """Spearman's rank correlation between each two tables, over the heads that both have a number for.

    The interval treats the heads as a sample: atanh(r) is about normal with the variance (1 + r^2 / 2) / (n -
    3) (Bonett and Wright 2000). Without at least four heads, or when one table ranks nothing, it is nan.

    Parameters
    ----------
    tables: by the name that each is to have in the result.
    column: which column is ranked.

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
    found = []
    for (first, a), (second, b) in combinations(tables.items(), 2):
        theirs = {(row.site, row.head): value for row, value in zip(b.rows, b[column].tolist(), strict=True)}
        pairs = [
            (value, theirs[row.site, row.head])
            for row, value in zip(a.rows, a[column].tolist(), strict=True)
            if (row.site, row.head) in theirs
        ]
        pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
        found.append(Agreement(first, second, *_interval(pairs), len(pairs)))
    return found


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of the ranks of two vectors (n,); those that are equal share their mean rank.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 9.0]))
    1.0
    """
    x, y = (_ranks(value) - (len(value) - 1) / 2 for value in (a, b))
    # Sums of half-integers are exact, and so is the square root of a square: equal ranks give 1.0 on any CPU.
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / spread)) if spread > 0 else math.nan


def _ranks(value: Tensor) -> Tensor:
    """(n,) in float64, from 0; the number of smaller ones plus half the other equal ones."""
    smaller = (value[:, None] > value).sum(1).double()
    return smaller + ((value[:, None] == value).sum(1).double() - 1) / 2


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
