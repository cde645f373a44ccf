"""Attention as its formulas say, plainly and in float64: what every kernel and statistic is held to.

Nothing here comes from the package. Weights are held whole, and hidden ones are multiplied by zero, so that a
query which may attend to nothing has zero output and zero gradient by construction.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def positions(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Positions of queries (queries, 1) and keys (1, keys): the last query stands at the last key."""
    return torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None, :]


def allowed(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    lengths: list[int] | None = None,
    query_lengths: list[int] | None = None,
) -> Tensor:
    """Who may see whom, one pair of positions at a time: (batch or 1, 1, queries, keys)."""
    i, j = positions(queries, keys)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        seen = seen & (j - i < window) & (i - j < window)
    if chunk is not None:
        seen = seen & (i.div(chunk, rounding_mode="floor") == j.div(chunk, rounding_mode="floor"))
    if lengths is not None:
        seen = seen & torch.stack([j < length for length in lengths])[:, None]
    if query_lengths is not None:
        row = torch.arange(queries)[:, None]
        seen = seen & torch.stack([row < length for length in query_lengths])[:, None]
    return seen


def alibi(heads: int, queries: int, keys: int) -> Tensor:
    """-slope * |i - j|, (heads, queries, keys), with the slopes of Press et al. 2021."""
    i, j = positions(queries, keys)
    return -slopes(heads).double()[:, None, None] * (i - j).abs()


def slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ... for a power of two n; otherwise the missing ones from every second of 2n."""
    power = 1
    while power * 2 <= heads:
        power *= 2
    first = torch.tensor([2 ** (-8 * (h + 1) / power) for h in range(power)], dtype=torch.float64)
    return first if power == heads else torch.cat((first, slopes(2 * power)[::2][: heads - power]))


def scores(q: Tensor, k: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """scale * q k^T + bias: (batch, heads, queries, keys), grouped key heads repeated."""
    q, k = q.double(), k.double()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads = [
        scale * q[:, h] @ k[:, h * k.shape[1] // q.shape[1]].transpose(-2, -1) for h in range(q.shape[1])
    ]
    s = torch.stack(heads, dim=1)
    return s if bias is None else s + bias.double()


def softmax(s: Tensor, seen: Tensor) -> Tensor:
    """exp(s) over its sum, among the keys that are seen; zero in a row that sees nothing."""
    seen = seen & (s > -torch.inf)
    finite = torch.where(seen, s, 0.0)
    top = finite.masked_fill(~seen, -1e300).amax(-1, keepdim=True) if s.shape[-1] else 0.0
    e = torch.where(seen, torch.where(seen, finite - top, 0.0).exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


def weights(q: Tensor, k: Tensor, seen: Tensor, bias: Tensor | None = None, scale: Any = None) -> Tensor:
    """Attention weights (batch, heads, queries, keys)."""
    return softmax(scores(q, k, bias, scale), seen)


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None, scale: Any = None
) -> Tensor:
    """softmax(scale * q k^T + bias) v, (batch, heads, queries, d_value)."""
    return mix(weights(q, k, seen, bias, scale), v)


def mix(p: Tensor, v: Tensor) -> Tensor:
    """Weights (batch, heads, queries, keys) times grouped values (batch, kv_heads, keys, d_value)."""
    return torch.stack(
        [p[:, h] @ v[:, h * v.shape[1] // p.shape[1]].double() for h in range(p.shape[1])], dim=1
    )


def statistics(s: Tensor, seen: Tensor, features: Tensor | None = None) -> dict[str, Tensor]:
    """Every statistic, from scores (batch, heads, queries, keys) and who may see whom."""
    p = softmax(s, seen)
    i, j = (x.double() for x in positions(s.shape[2], s.shape[3]))
    far = (i - j).abs()
    hidden = s.masked_fill(~seen, -torch.inf)
    mean = (p * j).sum(-1, keepdim=True)
    found = {
        "keys": (hidden > -torch.inf).sum(-1).double(),
        "logsumexp": hidden.logsumexp(-1),
        "entropy": -(p * torch.where(p > 0, p, 1.0).log()).sum(-1),
        "self": (p * (j == i)).sum(-1),
        "previous": (p * (j == i - 1)).sum(-1),
        "next": (p * (j == i + 1)).sum(-1),
        "first": p[..., 0],
        "confidence": p.amax(-1),
        "collision": p.square().sum(-1),
        "distance": (p * far).sum(-1),
        "distance_spread": (p * (j - mean).square()).sum(-1).sqrt(),
        "local": (p * (far <= 8)).sum(-1),
        "largest_logit": hidden.amax(-1),
        "received": p.sum(-2),
    }
    return found if features is None else found | {"features": p @ features.double()[:, None]}


def turned(x: Tensor, width: int, base: float = 10000.0, start: int = 0) -> Tensor:
    """Rotary positions, as complex numbers: channels c and c + width / 2 of (..., length, d) make a pair."""
    half = width // 2
    place = torch.arange(start, start + x.shape[-2], dtype=torch.float64)
    frequency = base ** (-torch.arange(half, dtype=torch.float64) * 2 / width)
    turn = torch.exp(1j * place[:, None] * frequency)
    pair = torch.complex(x[..., :half].double(), x[..., half:width].double()) * turn
    return torch.cat((pair.real, pair.imag, x[..., width:].double()), dim=-1)


def multihead(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    bias: Tensor | None = None,
    rotary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The textbook: project, attend head by head, concatenate, project. (output, weights)."""
    outs, maps = [], []
    group = module.heads // module.kv_heads
    for h in range(module.heads):
        q = _project(query, module.query, h, module.d_key)
        k = _project(key, module.key, h // group, module.d_key)
        v = _project(value, module.value, h // group, module.d_value)
        if module.query_norm is not None:
            q, k = _rms(q, module.query_norm), _rms(k, module.key_norm)
        if rotary is not None:
            q, k = turned(q, rotary), turned(k, rotary)
        of_head = seen[:, h : h + 1] if seen.shape[1] > 1 else seen
        s = (q @ k.transpose(-2, -1) / math.sqrt(module.d_key))[:, None]
        p = softmax(s if bias is None else s + bias[:, h : h + 1], of_head)[:, 0]
        outs.append(p @ v)
        maps.append(p)
    joined = torch.cat(outs, dim=-1) @ module.output.weight.T
    return joined if module.output.bias is None else joined + module.output.bias, torch.stack(maps, dim=1)


def _project(x: Tensor, linear: Any, head: int, width: int) -> Tensor:
    rows = slice(head * width, (head + 1) * width)
    projected = x @ linear.weight[rows].T
    return projected if linear.bias is None else projected + linear.bias[rows]


def _rms(x: Tensor, norm: Any) -> Tensor:
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
