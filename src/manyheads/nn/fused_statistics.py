"""The core statistics from one more call of the fused kernel, with the keys as values.

The kernel tells lse_i = log sum_j exp(s_ij) and, given keys as values, m_i = sum_j p_ij k_j. Then the entropy
-sum_j p_ij log p_ij is lse_i - scale * q_i . m_i, and any single weight is exp(s_ij - lse_i).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.fused import fused_with_logsumexp
from manyheads.nn.mask import Mask
from manyheads.nn.tiles import mean_key, scratch

# Elements of the queries taken at once.
PIECE = 2**20
# With fewer keys the tiles are faster.
SHORTEST = 2048
# Queries of a block on the diagonal.
BLOCK = 16


def pays(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether this engine serves (a kernel that tells lse, a mask whose single entries have a formula), and
    is faster than tiles: for long sequences.
    """
    possible = q.device.type == "cpu" and mask.slopes is None and not mask.tensors
    return possible and k.shape[2] >= SHORTEST


def core(q: Tensor, k: Tensor, mask: Mask, scale: float, features: Tensor | None) -> dict[str, Tensor]:
    """The core statistics of q (batch, kv_heads, group, queries, d_key) over k, still grouped.

    Some sequences, or some heads of one, at a time, so that what is needed on the way stays small.
    """
    batch, kv_heads, group, queries, width = q.shape
    sequences = max(1, PIECE // max(1, kv_heads * group * queries * width))
    heads = max(1, min(kv_heads, PIECE // max(1, group * queries * width)))
    rows = []
    for start in range(0, max(1, batch), sequences):
        members = slice(start, start + sequences)
        lengths, real = (None if x is None else x[members] for x in (mask.lengths, mask.queries))
        part = replace(mask, lengths=lengths, queries=real)
        given = None if features is None else features[members]
        pieces = [
            _core(q[members, head : head + heads], k[members, head : head + heads], part, scale, given)
            for head in range(0, kv_heads, heads)
        ]
        rows.append({name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _core(q: Tensor, k: Tensor, mask: Mask, scale: float, features: Tensor | None) -> dict[str, Tensor]:
    take, mean = scratch(q.dtype, q.device), mean_key(k)
    width, keys, offset, grouped = k.shape[3], k.shape[2], k.shape[2] - q.shape[3], (k.shape[1], q.shape[2])
    around = take("keys", (*k.shape[:2], keys + 3, width))  # rows of zeros before and after
    around[:, :, :2], around[:, :, keys + 2 :] = 0.0, 0.0
    k = torch.sub(k, mean.unsqueeze(2), out=around[:, :, 2 : keys + 2])
    q = q if q.is_contiguous() else take("queries", q.shape).copy_(q)
    heads_q, values, padded_k = q.flatten(1, 2), k, k
    if features is not None:
        values = torch.cat((k, features[:, None].expand(-1, k.shape[1], -1, -1)), dim=-1)
        extra = (0, features.shape[2])
        heads_q, padded_k = F.pad(heads_q, extra), F.pad(k, extra)
    means, lse = fused_with_logsumexp(heads_q, padded_k, values, mask, scale, offset)
    means, lse = means.unflatten(1, grouped), lse.unflatten(1, grouped)
    count = mask.count(q.shape[3], keys, q.device)[:, None, None].expand(lse.shape).to(lse.dtype)
    nothing = count == 0
    entropy = (lse - scale * band(q, means[..., :width], 1)[..., 0, :]).clamp_(min=0.0)
    entropy = entropy.minimum(count.log()).masked_fill_(nothing, 0.0)
    whole, first = (scale * (q @ torch.stack((mean, around[:, :, 2]), -1).unsqueeze(2))).unbind(-1)
    lse = lse.masked_fill(nothing, torch.inf)  # so that every weight of such a query is zero
    i = torch.arange(offset, keys, device=q.device)
    seen = {
        "keys": count,
        "logsumexp": (lse + whole).masked_fill_(nothing, -torch.inf),
        "entropy": entropy,
        "first": (first - lse).exp_() * _allowed(mask, i, torch.zeros_like(i), keys),
    }
    start = max(0, -offset - 1)  # the first query that has a key at its own place or at the next
    near = scale * band(q[..., start:, :], around[:, :, None, start + offset + 1 :], 3)
    for step, name in enumerate(("previous", "self", "next"), -1):
        weight = (near[..., step + 1, :] - lse[..., start:]).exp_()
        weight = weight * _allowed(mask, i[start:], i[start:] + step, keys)
        seen[name] = F.pad(weight, (start, 0))
    return seen | ({} if features is None else {"features": means[..., width:]})


def band(x: Tensor, y: Tensor, size: int) -> Tensor:
    """The products x_i . y_(i+t) for t < size: of x (..., rows, width) with y (..., at least rows + size - 1,
    width), (..., size, rows).

    Blocks on the diagonal are multiplied whole: more arithmetic, but everything is read once.

    >>> x, y = torch.randn(2, 37, 8), torch.randn(2, 39, 8)
    >>> torch.allclose(band(x, y, 3)[:, 2], (x * y[:, 2:]).sum(-1), atol=1e-5)
    True
    """
    rows, width = x.shape[-2:]
    found = x.new_empty(*x.shape[:-2], size, rows)
    whole = rows // BLOCK * BLOCK
    ys = y.expand(*x.shape[:-2], *y.shape[-2:])
    for place in product(*map(range, x.shape[:-2])):
        one, other, out = x[place], ys[place], found[place]
        blocks = one[:whole].unflatten(0, (-1, BLOCK))
        beside = other.as_strided(
            (whole // BLOCK, width, BLOCK + size - 1),
            (BLOCK * other.stride(0), other.stride(1), other.stride(0)),
        )
        squares = torch.bmm(blocks, beside)
        for t in range(size):
            out[t, :whole] = squares.diagonal(t, 1, 2).flatten()
            torch.linalg.vecdot(one[whole:], other[whole + t : rows + t], out=out[t, whole:])
    return found


def _allowed(mask: Mask, i: Tensor, j: Tensor, keys: int) -> Tensor:
    """Whether the queries at positions i may attend to the keys at positions j, one each: 0 or 1."""
    allowed = mask.allows(i, j) & (j >= 0) & (j < keys)
    return allowed if mask.lengths is None else allowed & (j < mask.lengths.to(j.device)[:, None, None, None])
