"""The core statistics from one more call of the fused kernel, with the keys as values.

The kernel tells lse_i = log sum_j exp(s_ij) and, given keys as values, m_i = sum_j p_ij k_j. Then the entropy
-sum_j p_ij log p_ij is lse_i - scale * q_i . m_i, and any single weight is exp(s_ij - lse_i).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.fused import fused_with_logsumexp
from manyheads.nn.mask import Mask
from manyheads.nn.tile_statistics import CORE
from manyheads.nn.tiles import Scratch, mean_key, scratch

# Elements of the queries taken at once.
PIECE = 2**20


def pays(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether this engine serves (a kernel that tells lse, a mask whose single entries have a formula), and
    is faster than tiles.
    """
    possible = q.device.type == "cpu" and mask.slopes is None and not mask.tensors
    return possible and k.shape[2] >= shortest(k.shape[3])


def shortest(width: int) -> int:
    """How many keys it takes: the products of tiles are slow with narrow heads. Measured, not derived."""
    return 256 if width <= 48 else 2048


def core(q: Tensor, k: Tensor, mask: Mask, scale: float, features: Tensor | None) -> dict[str, Tensor]:
    """The core statistics of q (batch, kv_heads, group, queries, d_key) over k, still grouped.

    Some sequences, or some heads of one, at a time, so that what is needed on the way stays small.
    """
    batch, kv_heads, group, queries, width = q.shape
    sequences = max(1, PIECE // max(1, kv_heads * group * queries * width))
    heads = max(1, min(kv_heads, PIECE // max(1, group * queries * width)))
    seen = {name: q.new_zeros(q.shape[:4]) for name in CORE}
    if features is not None:
        seen["features"] = q.new_empty(*q.shape[:4], features.shape[2])
    for start in range(0, batch, sequences):
        members = slice(start, start + sequences)
        lengths, real = (None if x is None else x[members] for x in (mask.lengths, mask.queries))
        part = replace(mask, lengths=lengths, queries=real)
        given = None if features is None else features[members]
        for head in range(0, kv_heads, heads):
            place = members, slice(head, head + heads)
            _core(
                q[place], k[place], part, scale, given, {name: value[place] for name, value in seen.items()}
            )
    return seen


def _core(
    q: Tensor, k: Tensor, mask: Mask, scale: float, features: Tensor | None, out: dict[str, Tensor]
) -> None:
    """Fill in the statistics of some sequences and heads; ``out`` holds zeros."""
    take, mean = scratch(q.dtype, q.device), mean_key(k)
    k = torch.sub(k, mean.unsqueeze(2), out=take("keys", k.shape))
    q = torch.mul(q, scale, out=take("queries", q.shape))
    # The scores that centring took away, and those of the first key, in one product.
    pair = torch.stack((mean, k[:, :, 0] if k.shape[2] else mean), dim=-1)
    shift, first = (q.flatten(2, 3) @ pair).unflatten(2, q.shape[2:4]).unbind(-1)
    width, offset, grouped = k.shape[3], k.shape[2] - q.shape[3], (k.shape[1], q.shape[2])
    heads_q, values, padded_k = q.flatten(1, 2), k, k
    if features is not None:
        values = torch.cat((k, features[:, None].expand(-1, k.shape[1], -1, -1)), dim=-1)
        extra = (0, features.shape[2])
        heads_q, padded_k = F.pad(heads_q, extra), F.pad(k, extra)
    means, lse = fused_with_logsumexp(heads_q, padded_k, values, mask, 1.0, offset)
    means, lse = means.unflatten(1, grouped), lse.unflatten(1, grouped)
    count = mask.count(q.shape[3], k.shape[2], q.device)[:, None, None]
    out["keys"].copy_(count)
    torch.sub(lse, _dot(q, means[..., :width], take), out=out["entropy"])
    out["entropy"].clamp_(min=0.0).copy_(out["entropy"].minimum(count.to(lse.dtype).log()))
    torch.add(lse, shift, out=out["logsumexp"])
    nothing = count == 0
    if nothing.any():
        out["entropy"].masked_fill_(nothing, 0.0)
        out["logsumexp"].masked_fill_(nothing, -torch.inf)
        lse = lse.masked_fill(nothing, torch.inf)  # so that every weight of such a query is zero
    i = torch.arange(offset, k.shape[2], device=q.device)
    for name, step in (("self", 0), ("previous", -1), ("next", 1)):
        if mask.causal and step > 0:
            continue
        # Queries [start, stop) have a key at this step from their own position.
        start, stop = max(0, -offset - step), min(q.shape[3], k.shape[2] - offset - step)
        part = k[:, :, None, start + offset + step : max(start, stop) + offset + step]
        s = _dot(q[..., start:stop, :], part, take)
        weights = torch.sub(s, lse[..., start:stop], out=out[name][..., start:stop]).exp_()
        _hide(weights, _allowed(mask, i, i + step)[..., start:stop])
    if k.shape[2]:
        weights = torch.sub(first, lse, out=out["first"]).exp_()
        _hide(weights, _allowed(mask, i, torch.zeros_like(i)))
    if features is not None:
        out["features"].copy_(means[..., width:])


def _dot(x: Tensor, y: Tensor, take: Scratch) -> Tensor:
    """Row by row. A product with ones sums faster than `sum` does over so few columns."""
    products = torch.mul(x, y, out=take("products", x.shape))
    return products @ products.new_ones(x.shape[-1])


def _hide(weights: Tensor, allowed: Tensor) -> None:
    if not allowed.all():
        weights *= allowed


def _allowed(mask: Mask, i: Tensor, j: Tensor) -> Tensor:
    """Whether the queries at positions i may attend to the keys at positions j, one each: 0 or 1."""
    allowed = mask.allows(i, j)
    return allowed if mask.lengths is None else allowed & (j < mask.lengths.to(j.device)[:, None, None, None])
