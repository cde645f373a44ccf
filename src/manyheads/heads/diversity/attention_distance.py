"""Attention compared row by row: Jensen-Shannon distance and overlap on sampled queries, with errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads.capture.call import Call
from manyheads.heads.diversity.pair_sums import Pairs
from manyheads.nn.mask import Mask

# Numbers held at once while heads are compared.
_ELEMENTS = 2**22


def attention_rows(call: Call, sequences: Tensor, queries: Tensor) -> Tensor:
    """The attention of all heads from chosen queries, (heads, rows, keys + sinks); every row sums to one.

    ``sequences`` and ``queries``, (rows,) each, say where in the batch the rows stand, sequence by sequence.
    """
    exact = torch.promote_types(call.output.dtype, torch.float32)
    if call.scores is not None:
        return call.scores[sequences, :, queries].to(exact).softmax(-1).transpose(0, 1)
    if call.query is None or call.key is None:
        raise ValueError(f"{call.site.name}: a call with neither scores nor queries and keys")
    heads, width = call.query.shape[1], call.query.shape[3]
    scale = width**-0.5 if call.scale is None else call.scale
    parts = []
    for n in sequences.unique().tolist():
        positions = queries[sequences == n]
        q = call.query[n, :, positions].to(exact)  # (heads, rows, d_key)
        k = call.key[n].to(exact)  # (kv_heads, keys, d_key)
        k = k - k.mean(1, keepdim=True)
        scores = (q.reshape(k.shape[0], -1, width) @ k.transpose(1, 2) * scale).view(
            heads, len(positions), -1
        )
        parts.append(_masked(scores, call.mask, n, positions.tolist(), call.keys - call.queries).softmax(-1))
    return torch.cat(parts, 1)


def _masked(scores: Tensor, mask: Mask, sequence: int, queries: list[int], offset: int) -> Tensor:
    """Hide and bias the scores (heads, rows, keys) of some queries of one sequence, a row at a time."""
    if mask.empty:
        return scores
    keys, one = range(scores.shape[2]), slice(sequence, sequence + 1)
    for row, query in enumerate(queries):
        allowed, bias = mask.rectangle(range(query, query + 1), keys, offset, scores.device, one)
        if bias is not None:
            scores[:, row] += bias.to(scores.dtype).expand(1, len(scores), 1, -1)[0, :, 0]
        if allowed is not None:
            scores[:, row].masked_fill_(~allowed.expand(1, len(scores), 1, -1)[0, :, 0], -torch.inf)
    return scores


class RowSums:
    """Running sums of what is measured between the rows of every pair of heads.

    Rows come with a weight, the number of queries each stands for, so that the mean is that over all
    queries. `js` is the Jensen-Shannon distance (the root of the divergence in bits: 0 the same, 1 nothing in
    common), `overlap` the chance that both heads look at the same key.

    >>> sums = RowSums()
    >>> rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 0.5]]])  # three heads, one row, two keys
    >>> sums.add(rows, torch.arange(3), weight=1.0)
    >>> sums.mean("js")
    tensor([[0.0000, 1.0000, 0.5579],
            [1.0000, 0.0000, 0.5579],
            [0.5579, 0.5579, 0.0000]], dtype=torch.float64)
    >>> sums.mean("overlap")[2]
    tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        # rows, their weights, the squares of those; of each measure its sum with the weights, and with the
        # squares of the weights its sum and its sum of squares
        self.pairs = Pairs("rows", "weights", "squares", "divergence",
                           *(f"{name} {part}" for name in ("js", "overlap") for part in _PARTS))  # fmt: skip

    def add(self, rows: Tensor, heads: Tensor, weight: float) -> None:
        """Add rows (heads, rows, keys) of the ``heads`` with these numbers, all from the same queries."""
        count = rows.shape[1]
        ones = torch.ones(len(heads), len(heads), dtype=torch.float64)
        self.pairs.add("rows", heads, count * ones)
        self.pairs.add("weights", heads, count * weight * ones)
        self.pairs.add("squares", heads, count * weight**2 * ones)
        step = max(1, _ELEMENTS // (len(heads) * max(len(heads), rows.shape[2])))
        for part in rows.split(step, 1):
            divergence = jensen_shannon(part)
            overlap = torch.einsum("ark,brk->abr", part, part).to(torch.float64)
            self.pairs.add("divergence", heads, weight * divergence.sum(-1))
            for name, x in (("js", divergence.sqrt()), ("overlap", overlap)):
                total = x.sum(-1)
                values = (weight * total, weight**2 * total, weight**2 * x.square().sum(-1))
                for kind, value in zip(_PARTS, values, strict=True):
                    self.pairs.add(f"{name} {kind}", heads, value)

    def mean(self, name: str) -> Tensor:
        """``js``, ``overlap`` or ``divergence`` (heads, heads); NaN for heads that never met on all rows."""
        total = self.pairs[name if name == "divergence" else f"{name} sum"]
        return self.pairs.where_always("rows", total / self.pairs["weights"])

    def error(self, name: str) -> Tensor:
        """The standard error of a mean over rows, with rows as the independent units."""
        count, mean = self.pairs["rows"], self.mean(name)
        _, linear, square = (self.pairs[f"{name} {part}"] for part in _PARTS)
        spread = (square - 2 * mean * linear + mean**2 * self.pairs["squares"]).clamp(min=0.0)
        error = (spread * count / (count - 1)).sqrt() / self.pairs["weights"]
        return torch.where(count > 1, error, math.nan)


_PARTS = ("sum", "weighted sum", "weighted squares")


def jensen_shannon(rows: Tensor) -> Tensor:
    """The Jensen-Shannon divergence in bits of every pair of heads, (heads, heads, rows), from rows (heads,
    rows, keys) that sum to one.

    >>> jensen_shannon(torch.tensor([[[0.5, 0.5, 0.0]], [[0.0, 0.5, 0.5]]]))[0, 1]
    tensor([0.5000], dtype=torch.float64)
    """
    heads, count, _ = rows.shape
    divergences = torch.zeros(heads, heads, count, dtype=torch.float64, device=rows.device)
    last = rows.amax((0, 1)).nonzero()
    rows = rows[..., : int(last[-1]) + 1]  # causal rows end early
    single = _times_log(rows.clone())
    for a in range(heads - 1):
        # H((p + q) / 2) = 1 - sum (p + q) log2(p + q) / 2, as p + q sums to two
        mixture = _times_log(rows[a] + rows[a + 1 :])
        divergence = 1 + 0.5 * (single[a] + single[a + 1 :] - mixture)
        divergences[a, a + 1 :] = divergences[a + 1 :, a] = divergence.clamp(0.0, 1.0)
    return divergences


def jensen_shannon_between(rows: Tensor, others: Tensor) -> Tensor:
    """The Jensen-Shannon divergence in bits of each head with each of some others, (heads, others, rows),
    from rows (heads, rows, keys) and (others, rows, keys) that sum to one.

    >>> rows = torch.tensor([[[0.5, 0.5, 0.0]], [[0.0, 0.5, 0.5]]])
    >>> jensen_shannon_between(rows, rows[:1])[:, 0]
    tensor([[0.0000],
            [0.5000]], dtype=torch.float64)
    """
    single, other_single = _times_log(rows), _times_log(others)
    mixture = torch.stack([_times_log(head + others) for head in rows])
    return (1 + 0.5 * (single[:, None] + other_single - mixture)).clamp(0.0, 1.0)


def _times_log(x: Tensor) -> Tensor:
    """The sum of x log2 x over the last axis, in float64."""
    return (x.clamp(min=torch.finfo(x.dtype).tiny).log2_() * x).sum(-1, dtype=torch.float64)
