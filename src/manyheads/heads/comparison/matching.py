"""Which head of one model does what a head of another does: an assignment of least cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import numpy
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from manyheads.heads.table import HeadTable

Match = Literal["function", "number"]
# Metrics of a profile: what attention looks like, whatever the width of the head.
PROFILE = (
    "entropy_normalised", "confidence", "distance", "self", "previous", "next", "first", "local", "special",
    "rare", "frequent", "output_norm",
)  # fmt: skip
_NEVER = 1e9  # the cost of heads that cannot be the same
_TIE = 1e-9  # of two that cost the same, the one with the same number


def have_the_same_sites(heads: Mapping[str, int], others: Mapping[str, int]) -> bool:
    """Whether one of two models has the sites of the other, or some of them, with no more heads at any: as a
    fine-tune, a permuted copy or a cut model has. Then heads are matched within their site.

    >>> model = {"h.0": 5, "h.1": 5}
    >>> have_the_same_sites(model, {"h.1": 3}), have_the_same_sites(model, {"h.0": 7})
    (True, False)
    """
    return any(
        all(count <= more.get(site, 0) for site, count in fewer.items())
        for fewer, more in ((heads, others), (others, heads))
    )


def profile_distance(table: HeadTable, other: HeadTable) -> Tensor:
    """How differently heads behave, (heads, others): the root mean square difference of their metrics, each
    in units of its standard deviation over the heads of both tables.
    """
    metrics = [name for name in PROFILE if name in table.sums and name in other.sums]
    columns, other_columns = (torch.stack([t[name] for name in metrics], 1) for t in (table, other))
    all_columns = torch.cat([columns, other_columns])
    spread = torch.stack([spread_over_heads(column, 1e-12) for column in all_columns.unbind(1)])
    difference = (columns[:, None] - other_columns) / spread
    return difference.square().nanmean(-1).nan_to_num(_NEVER).sqrt()


def spread_over_heads(column: Tensor, least: float) -> Tensor:
    """The standard deviation of a metric over heads, ``least`` or more; 1 where no number is finite."""
    finite = column[column.isfinite()]
    return finite.std(unbiased=False).clamp(min=least) if len(finite) else torch.ones((), dtype=column.dtype)


def matched_heads(
    table: HeadTable, other: HeadTable, distance: Tensor | None, match: Match
) -> list[tuple[int, int]]:
    """Pairs of rows of both tables, each row in one pair at most.

    ``distance`` (heads, others) is that of their attention, NaN between heads that are not to be matched;
    without it profiles alone decide, within sites of the same name if both models have the same sites.
    """
    if match == "number":
        numbers = {(row.site, row.original_head): i for i, row in enumerate(other.rows)}
        keys = [(row.site, row.original_head) for row in table.rows]
        return [(i, numbers[key]) for i, key in enumerate(keys) if key in numbers]
    cost = profile_distance(table, other)
    if distance is not None:
        cost = cost + distance.nan_to_num(_NEVER)
    same = have_the_same_sites(Counter(table["site"]), Counter(other["site"]))
    for i, row in enumerate(table.rows):
        for j, candidate in enumerate(other.rows):
            if row.kind != candidate.kind or (same and row.site != candidate.site):
                cost[i, j] = _NEVER
            elif (row.site, row.original_head) == (candidate.site, candidate.original_head):
                cost[i, j] -= _TIE
    rows, columns = linear_sum_assignment(numpy.asarray(cost))
    return [(int(i), int(j)) for i, j in zip(rows, columns, strict=True) if cost[i, j] < _NEVER / 2]
