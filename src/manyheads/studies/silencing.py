"""What a model loses when heads are silenced in the order of a ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from manyheads.heads.silence import silence
from manyheads.heads.table import HeadTable
from manyheads.studies.subjects import Subject
from manyheads.surgery.plan import plan


def candidates(table: HeadTable) -> HeadTable:
    """The heads that may go: those of the encoder, in a model that has one and a decoder; else all.

    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> rows = [Row(kind, 0, 0, 0, 0, kind) for kind in ("self", "causal", "cross")]
    >>> candidates(HeadTable(rows, torch.ones(3), {}))["site"]
    ['self']
    """
    kinds = table["kind"]
    kept = [i for i, kind in enumerate(kinds) if kind == "self" or "self" not in kinds]
    sums = {name: values[:, kept] for name, values in table.sums.items()}
    return HeadTable([table.rows[i] for i in kept], table.tokens[kept], sums, table.model)


def reverse(table: HeadTable) -> HeadTable:
    """The ranking the other way round."""
    count, total, squares = table.sums["importance"]
    return replace(table, sums={"importance": torch.stack([count, -total, squares])})


def damages(looked: Subject, ranking: HeadTable, shares: Sequence[float]) -> list[float]:
    """The loss that comes from silencing these shares of the heads of a ranking, the least important first.

    It is relative to that of silencing all of them: 0 is the full model, 1 is a model without these heads.
    """
    full = looked.loss()
    everything: dict[str, list[int]] = {}
    for row in ranking.rows:
        everything.setdefault(row.site, []).append(row.head)
    worst = _without(looked, everything) - full
    sets = [plan(ranking, 1 - share, floor=0).heads for share in shares]
    return [(_without(looked, heads) - full) / worst for heads in sets]


def _without(looked: Subject, heads: Mapping[str, list[int]]) -> float:
    with silence(looked.model, dict(heads)):
        return looked.loss()
