"""A summary of a diversity table: layer by layer, and the pairs that stand out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.heads.diversity.result import head_names
from manyheads.heads.table import HeadTable


class Layer(NamedTuple):
    """How different the heads of one site are.

    Attributes
    ----------
    site, layer, kind, heads: which it is, and how many heads it has.
    mean, spread: mean and standard deviation over its pairs of heads, for each matrix of the table.
    distinct_attention: the effective number of heads that look at different places: between 1, all look
        alike, and the number of heads, no two share a key.
    distinct_outputs: the effective number of heads that say different things.
    rank, rank_99: how many directions its heads' outputs span together, and how many hold 99% of the
        variance.
    """

    site: str
    layer: int
    kind: str
    heads: int
    mean: dict[str, float]
    spread: dict[str, float]
    distinct_attention: float
    distinct_outputs: float
    rank: float
    rank_99: float


def layers(table: HeadTable) -> list[Layer]:
    """Sum up each layer of a table from `diversity`.

    >>> from torch import nn
    >>> from manyheads.heads.diversity import diversity
    >>> table = diversity(nn.MultiheadAttention(6, 2, batch_first=True), [[torch.randn(3, 7, 6)] * 3])
    >>> layer = layers(table)[0]
    >>> layer.heads, layer.rank, 1 <= layer.distinct_attention <= 2
    (2, 6.0, True)
    >>> layer.mean["js"] == table.matrices["js"][0, 1].item()
    True
    """
    summaries = []
    for site in dict.fromkeys(table["site"]):
        heads = torch.tensor([i for i, row in enumerate(table.rows) if row.site == site])
        row = table.rows[int(heads[0])]
        upper = torch.triu_indices(len(heads), len(heads), 1)
        mean, spread = {}, {}
        for name, matrix in table.matrices.items():
            if not name.endswith("_se"):
                pairs = matrix[heads][:, heads][upper[0], upper[1]]
                mean[name] = pairs.nanmean().item()
                finite = pairs[pairs.isfinite()]
                spread[name] = finite.std().item() if len(finite) > 1 else math.nan
        columns = [table[name][heads[0]].item() if name in table.sums else math.nan for name in _RANKS]
        attention, outputs = distinct(table, heads)
        summaries.append(
            Layer(site, row.layer, row.kind, len(heads), mean, spread, attention, outputs, *columns)
        )
    return summaries


_RANKS = ("rank", "rank_99")


def distinct(table: HeadTable, heads: Tensor) -> tuple[float, float]:
    """The effective number of distinct heads among some, by attention and by outputs; NaN if unknown."""
    kernels = []
    for name, kernel in (("js_divergence", lambda x: 1 - x), ("cka", lambda x: x)):
        matrix = table.matrices.get(name)
        kernels.append(math.nan if matrix is None else effective_number(kernel(matrix[heads][:, heads])))
    return kernels[0], kernels[1]


def effective_number(similarity: Tensor) -> float:
    """How many different things there are among n with these similarities (n, n) between 0 and 1.

    The exponential of the entropy of the eigenvalues of similarity / n (the Vendi score, Friedman and Dieng
    2022): n things that share nothing count n, n copies of one count 1. Both 1 - Jensen-Shannon divergence
    and CKA are positive semidefinite, as this needs. Things without similarities are left out.

    >>> effective_number(torch.eye(3, dtype=torch.float64)), effective_number(torch.ones(3, 3).double())
    (3.0, 1.0)
    """
    finite = similarity.diagonal().isfinite()
    similarity = similarity[finite][:, finite]
    if not len(similarity) or not bool(similarity.isfinite().all()):
        return math.nan
    values = torch.linalg.eigvalsh(similarity / len(similarity)).clamp(min=0.0)
    return round(math.exp(-torch.special.xlogy(values, values).sum().item()), 9)


class Pair(NamedTuple):
    """Two heads and a number between them."""

    one: str
    other: str
    value: float


def extreme(table: HeadTable, name: str, count: int, largest: bool) -> list[Pair]:
    """The pairs of heads with the largest or smallest values of a matrix, the most extreme first.

    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(3)]
    >>> js = torch.tensor([[0.0, 0.3, 0.2], [0.3, 0.0, 0.9], [0.2, 0.9, 0.0]])
    >>> extreme(HeadTable(rows, torch.ones(3), {}, matrices={"js": js}), "js", 1, largest=False)
    [Pair(one='0.0', other='0.2', value=0.2...)]
    """
    matrix, names = table.matrices[name], head_names(table.rows)
    rows, columns = torch.triu_indices(len(table), len(table), 1)
    values = matrix[rows, columns]
    finite = values.isfinite()
    rows, columns, values = rows[finite], columns[finite], values[finite]
    order = values.argsort(descending=largest, stable=True)[:count].tolist()
    return [Pair(names[rows[i]], names[columns[i]], values[i].item()) for i in order]
