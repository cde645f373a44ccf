"""The core statistics from one more call of the fused kernel, with the keys as values.

The kernel tells lse_i = log sum_j exp(s_ij) and, given keys as values, m_i = sum_j p_ij k_j. Then the entropy
-sum_j p_ij log p_ij is lse_i - scale * q_i . m_i, and any single weight is exp(s_ij - lse_i).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.fused import fused_with_logsumexp
from manyheads.nn.mask import Mask


def possible(q: Tensor, mask: Mask) -> bool:
    """Whether this engine serves: a kernel that tells lse, and a mask whose single entries have a formula."""
    return q.device.type == "cpu" and mask.slopes is None and not mask.tensors


def core(q: Tensor, k: Tensor, mask: Mask, scale: float, features: Tensor | None) -> dict[str, Tensor]:
    """The core statistics of q (batch, kv_heads, group, queries, d_key) over centred keys k, ungrouped."""
    width, offset = k.shape[3], k.shape[2] - q.shape[3]
    heads_q, values, padded_k = q.flatten(1, 2), k, k
    if features is not None:
        values = torch.cat((k, features[:, None].expand(-1, k.shape[1], -1, -1)), dim=-1)
        extra = (0, features.shape[2])
        heads_q, padded_k = F.pad(heads_q, extra), F.pad(k, extra)
    means, lse = fused_with_logsumexp(heads_q, padded_k, values, mask, scale, offset)
    grouped = (-1, q.shape[2])
    lse = lse.unflatten(1, grouped)
    expected = scale * torch.linalg.vecdot(q, means[..., :width].unflatten(1, grouped))
    count = mask.count(q.shape[3], k.shape[2], q.device)
    seen = {"keys": count[:, None, None].expand(lse.shape).to(lse.dtype)}
    nothing = seen["keys"] == 0
    seen["logsumexp"] = lse.masked_fill(nothing, -torch.inf)
    seen["entropy"] = (lse - expected).clamp_(min=0.0).masked_fill_(nothing, 0.0)
    for name, step in (("self", 0), ("previous", -1), ("next", 1)):
        seen[name] = _weights_at(q, k, lse, mask, scale, offset, offset + step)
    seen["first"] = _weights_at(q, k, lse, mask, scale, offset, None)
    for name in ("self", "previous", "next", "first"):
        seen[name].masked_fill_(nothing, 0.0)
    if features is not None:
        seen["features"] = means[..., width:].unflatten(1, grouped)
    return seen


def _weights_at(
    q: Tensor, k: Tensor, lse: Tensor, mask: Mask, scale: float, offset: int, shift: int | None
) -> Tensor:
    """p_ij at key j = i + shift of each query i, or at the first key; zero where there is no such key."""
    queries, keys = q.shape[3], k.shape[2]
    i = torch.arange(queries, device=q.device)
    j = torch.zeros_like(i) if shift is None else i + shift
    rows = (
        slice(0, queries)
        if shift is None
        else slice(max(0, -shift), max(0, -shift, min(queries, keys - shift)))
    )
    part = k[:, :, :1] if shift is None else k[:, :, max(0, shift) : max(0, shift) + rows.stop - rows.start]
    allowed = mask.allows(i[rows] + offset, j[rows])
    if mask.lengths is not None:
        allowed = allowed & (j[rows] < mask.lengths.to(q.device)[:, None, None, None])
    s = scale * torch.linalg.vecdot(q[..., rows, :], part[:, :, None])
    weights = torch.zeros_like(lse)
    weights[..., rows] = (s - lse[..., rows]).exp() * allowed
    return weights
