"""Dropout on few attention weights: all of them at once, by torch's own operators.

Below a few hundred tokens a tile's bookkeeping costs more than its arithmetic. The weights are then few
enough to keep for the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.nn.mask import Mask
from manyheads.nn.residual import dropout_factors

# The most weights, of all heads and sequences together, and the most keys: 2 MiB a tensor, three kept.
WEIGHTS = 2**19
KEYS = 256


def has_few_weights(q: Tensor, k: Tensor, mask: Mask, offset: int) -> bool:
    """Whether `attend_in_memory` suits this attention: few weights, and no query without a key."""
    return (
        bool(q.numel() and k.numel())
        and k.shape[2] <= KEYS
        and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= WEIGHTS
        and mask.geometric
        and offset >= 0
        and q.dtype in (torch.float32, torch.float64)
    )


def attend_in_memory(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int
) -> Tensor:
    """Attention (batch, heads, queries, d_value) with every weight in memory; see `has_few_weights`."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    allowed, _ = mask.rectangle(range(queries), range(keys), offset, q.device)
    bias = q.new_zeros(queries, keys)
    if allowed is not None:
        bias.masked_fill_(~allowed, -torch.inf)
    if heads > kv_heads:  # the heads of a group are further queries of the key head they share
        bias = bias.repeat(heads // kv_heads, 1)
    folded_q = q.reshape(batch * kv_heads, heads // kv_heads * queries, q.shape[3])
    folded_k, folded_v = (x.reshape(batch * kv_heads, keys, x.shape[3]) for x in (k, v))
    scores = torch.baddbmm(bias, folded_q, folded_k.transpose(1, 2), alpha=scale)
    weights = scores.softmax(-1)
    out = torch.bmm(weights * _factors(weights.detach(), dropout), folded_v)
    return out.view(batch, heads, queries, v.shape[3])


@torch.library.custom_op(
    "manyheads::dropout_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _factors(weights: Tensor, rate: float) -> Tensor:
    """An operator, so that a compiled module draws what the module itself draws."""
    return dropout_factors(weights, rate)


@_factors.register_fake
def _(weights: Tensor, rate: float) -> Tensor:
    return torch.empty_like(weights)
