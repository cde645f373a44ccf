"""Patterns of attention that leave keys out, or the softmax, which studies compare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn import mask as masks
from manyheads.nn.mask import Mask


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """phi(q) (phi(k)^T v), divided by the sum of its weights, with phi = elu + 1.

    All three are ``(batch, heads, n, width)``.

    >>> linear_attention(*torch.randn(3, 2, 3, 5, 4)).shape
    torch.Size([2, 3, 5, 4])
    """
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = q @ k.sum(2).unsqueeze(-1)
    return q @ (k.transpose(2, 3) @ v) / weights


def global_window(q: Tensor, k: Tensor, v: Tensor, *, window: int, global_tokens: int) -> Tensor:
    """Attention of tokens less than ``window`` apart, and of global tokens: these see and are seen by all.

    The first ``global_tokens`` are global; q, k and v are ``(batch, heads, n, width)``. Blocks of ``window``
    queries read three blocks of keys and the global ones, which costs O(n window).

    >>> global_window(*torch.randn(3, 2, 3, 50, 4), window=8, global_tokens=2).shape
    torch.Size([2, 3, 50, 4])
    """
    length, size = q.shape[2], q.shape[3]
    blocks = -(-length // window)
    spare = blocks * window - length
    queries = F.pad(q, (0, 0, 0, spare)).reshape(-1, blocks, window, size)
    near = [
        F.pad(x, (0, 0, window, spare + window)).unfold(2, 3 * window, window).transpose(3, 4) for x in (k, v)
    ]
    keys, values = (
        torch.cat([x[:, :, None, :global_tokens].expand(-1, -1, blocks, -1, -1), part], 3).flatten(0, 1)
        for x, part in zip((k, v), near, strict=True)
    )
    out = F.scaled_dot_product_attention(
        queries, keys, values, _allowed(length, blocks, window, global_tokens)
    )
    out = out.reshape(*q.shape[:2], -1, size)[:, :, :length]
    first = F.scaled_dot_product_attention(q[:, :, :global_tokens], k, v)
    return torch.cat([first, out[:, :, global_tokens:]], 2)


def _allowed(length: int, blocks: int, window: int, global_tokens: int) -> Tensor:
    """Which of a block's keys each query may attend to, ``(blocks, window, global_tokens + 3 window)``."""
    block = torch.arange(blocks)[:, None, None]
    i = block * window + torch.arange(window)[:, None]
    j = (block - 1) * window + torch.arange(3 * window)
    near = ((i - j).abs() < window) & (j >= global_tokens) & (j < length)
    return F.pad(near, (global_tokens, 0), value=True)


def pattern_mask(pattern: str, size: int, length: int, global_tokens: int) -> Mask | Tensor | None:
    """Who may attend to whom in a row of this length: "full", "chunk", "window" or "global".

    >>> pattern_mask("global", size=1, length=3, global_tokens=1).int()
    tensor([[1, 1, 1],
            [1, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    if pattern in ("chunk", "window"):
        return masks.chunk(size) if pattern == "chunk" else masks.window(size)
    special = torch.arange(length) < global_tokens
    return (
        None if pattern == "full" else masks.window(size).dense(length, length) | special | special[:, None]
    )
