"""How drawn modules multiply: fused kernels, products in several layouts, einsum with any letters, loops."""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING

import torch
from tests.zoo.case import View
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from tests.zoo.drawn import Drawn

LOW = {"-inf": -torch.inf, "-1e4": -1e4, "lowest": torch.finfo(torch.float32).min}


def lay(t: Tensor, layout: str) -> Tensor:
    """(batch, heads, ...) to this layout."""
    if layout in ("hb", "fold hb"):
        t = t.transpose(0, 1)
    if layout == "split":
        return t.unflatten(1, (2, -1))
    if layout == "one":
        return t.unsqueeze(1)
    return t.flatten(0, 1) if layout.startswith("fold") else t


def unlay(t: Tensor, layout: str, batch: int) -> Tensor:
    """Back to (batch, heads, ...)."""
    if layout.startswith("fold"):
        t = t.unflatten(0, (batch, -1) if layout == "fold bh" else (-1, batch))
    if layout in ("hb", "fold hb"):
        return t.transpose(0, 1)
    if layout == "split":
        return t.flatten(1, 2)
    return t.squeeze(1) if layout == "one" else t


def weighed(net: Drawn, s: Tensor, hidden: Tensor | None) -> Tensor:
    """Weights over the last axis of scores that have their biases."""
    d = net.design
    if hidden is not None and d.change != "mask after":
        s = (
            s.masked_fill(hidden, -torch.inf)
            if d.low == "bool"
            else s + torch.zeros(()).masked_fill(hidden, LOW[d.low])
        )
    if d.function == "sigmoid":
        return s.sigmoid()
    if d.function == "exp/sum":
        e = (s - s.amax(-1, keepdim=True)).exp()
        a = e / e.sum(-1, keepdim=True)
    elif d.function == "log_softmax":
        a = s.log_softmax(-1).exp()
    elif d.function == "float64":
        a = s.softmax(-1, dtype=torch.float64).to(s.dtype)
    else:
        a = s.softmax(-1)
    return a.nan_to_num(0.0) if d.mask == "strict" else a


def changed(net: Drawn, a: Tensor, hidden: Tensor | None) -> Tensor:
    """(batch, heads, queries, keys) after the softmax."""
    d = net.design
    if d.change == "top-k":
        return torch.where(a >= a.topk(2, -1).values[..., -1:], a, 0.0)
    if d.change == "mask after" and hidden is not None:
        a = a * ~hidden
        return a / a.sum(-1, keepdim=True).clamp(min=1e-30)
    if d.change == "prior" and a.shape[-1] == d.length:
        return 0.4 * a + 0.6 * net.prior.softmax(-1)
    if d.change == "talking":
        return torch.einsum("bhij,gh->bgij", a, net.mix / net.mix.sum(1, keepdim=True))
    return 1.5 * a if d.change == "scaled" else a


def fused(net: Drawn, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, added: Tensor | None) -> Tensor:
    d, mask = net.design, None
    if hidden is not None and (added is not None or d.low != "bool"):
        mask = torch.zeros(hidden.shape).masked_fill(hidden, LOW.get(d.low, -torch.inf))
    elif hidden is not None:
        mask = ~hidden
    if added is not None:
        mask = added if mask is None else mask + added
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return o.nan_to_num(0.0) if d.mask == "strict" else o


def by_layout(
    net: Drawn, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, added: Tensor | None
) -> Tensor:
    """One product over all heads in the layout of the design."""
    d, batch = net.design, len(q)
    full = (batch, net.heads, q.shape[2], k.shape[2])
    q, k, v = (lay(t, d.layout) for t in (q, k, v))
    wide = None if hidden is None else lay(hidden.expand(full), d.layout)
    bias = None if added is None else lay(added.expand(full), d.layout)
    if d.code == "fused":
        return unlay(fused(net, q, k, v, wide, bias), d.layout, batch)
    s = q @ k.mT * net.width**-0.5
    a = weighed(net, s if bias is None else s + bias, wide)
    if d.change:
        a = lay(changed(net, unlay(a, d.layout, batch), hidden), d.layout)
    return unlay(a @ v, d.layout, batch)


def by_einsum(
    net: Drawn, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, added: Tensor | None
) -> Tensor:
    """Letters at random, axes in any order; the softmax is over wherever the keys stand."""
    d, r = net.design, random.Random(net.design.letters)
    b, h, i, j, c = r.sample(string.ascii_lowercase, 5)

    def order(letters: list[str]) -> str:
        return "".join(r.sample(letters, len(letters)))

    def put(t: Tensor, source: str, target: str) -> Tensor:
        return t.permute([source.index(letter) for letter in target])

    qs, ks, vs, outs, ss = (
        order(x) for x in ([b, h, i, c], [b, h, j, c], [b, h, j, c], [b, h, i, c], [b, h, i, j])
    )
    q, k, v = put(q, b + h + i + c, qs), put(k, b + h + j + c, ks), put(v, b + h + j + c, vs)
    s = torch.einsum(f"{qs},{ks}->{ss}", q, k) * net.width**-0.5
    usual = b + h + i + j
    full = [dict(zip(ss, s.shape, strict=True))[letter] for letter in usual]
    if added is not None:
        s = s + put(added.expand(full), usual, ss)
    wide = None if hidden is None else put(hidden.expand(full), usual, ss)
    keys = ss.index(j)
    a = weighed(net, s.movedim(keys, -1), None if wide is None else wide.movedim(keys, -1)).movedim(-1, keys)
    if d.change:
        a = put(changed(net, put(a, ss, usual), hidden), usual, ss)
    return put(torch.einsum(f"{ss},{vs}->{outs}", a, v), outs, b + h + i + c)


def by_loop(
    net: Drawn, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, added: Tensor | None
) -> Tensor:
    """Head by head, sample by sample, or a few queries at a time."""
    d = net.design
    full = (len(q), net.heads, q.shape[2], k.shape[2])
    wide = None if hidden is None else hidden.expand(full)
    bias = None if added is None else added.expand(full)

    def one(index: tuple[slice | int, ...], keys: tuple[slice | int, ...]) -> Tensor:
        s = q[index] @ k[keys].mT * net.width**-0.5
        s = s if bias is None else s + bias[index]
        return weighed(net, s, None if wide is None else wide[index]) @ v[keys]

    every = slice(None)
    if d.loop == "heads":
        return torch.stack([one((every, h), (every, h)) for h in range(net.heads)], 1)
    if d.loop == "heads kept":
        kept = [(every, slice(h, h + 1)) for h in range(net.heads)]
        return torch.cat([one(index, index) for index in kept], 1)
    if d.loop == "batch":
        return torch.stack([one((n,), (n,)) for n in range(len(q))])
    parts = [(every, every, slice(n, n + 4)) for n in range(0, q.shape[2], 4)]
    return torch.cat([one(index, (every,)) for index in parts], 2)


def pieces_of(weights: Tensor, size: int) -> list[View]:
    """The weights piece by piece, with the samples outside or inside."""
    parts = torch.stack(
        [weights[:, :, n : n + size, n : n + size] for n in range(0, weights.shape[-1], size)]
    )
    counted = torch.ones(parts.shape[0] * parts.shape[1], size, dtype=torch.bool)
    orders = parts.flatten(0, 1), parts.transpose(0, 1).flatten(0, 1)
    return [View(order, torch.arange(size), counted, first=False) for order in orders]
