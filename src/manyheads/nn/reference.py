"""The textbook formula, materialised: softmax(q k^T * scale + bias) v. The oracle of every other kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.mask import Mask


def weights(q: Tensor, k: Tensor, mask: Mask, scale: float, offset: int) -> Tensor:
    """Attention weights (batch, heads, queries, keys); rows that may attend to nothing are zero.

    >>> q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    >>> weights(q, k, Mask(), 0.5, 2)[0, 0, 0]
    tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
    """
    group = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat_interleave(group, dim=1).transpose(-2, -1)
    rows, columns = range(q.shape[2]), range(k.shape[2])
    allowed, bias = mask.rectangle(rows, columns, offset, q.device, dtype=q.dtype)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if allowed is None and bias is None:
        return scores.softmax(-1)
    # A row of -inf has no softmax: make it finite before, so that its gradient is zero and not NaN.
    something = (scores > -torch.inf).any(-1, keepdim=True)
    return scores.masked_fill(~something, 0.0).softmax(-1).masked_fill(~something, 0.0)


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int
) -> Tensor:
    """Attention by the formula: (batch, heads, queries, d_value), with every weight in memory."""
    p = F.dropout(weights(q, k, mask, scale, offset), dropout)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
