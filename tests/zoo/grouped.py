"""Heads that share keys, keys of other sequences, caches, several calls of one module."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Truth
from tests.zoo.masks import ahead
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "grouped"


class Grouped(Attention):
    """Six heads that share two key heads. order: which head reads which key head."""

    heads, kv_heads = 6, 2
    kinds = ("causal",)

    def build(self) -> None:
        self.k, self.v = (nn.Linear(self.d_model, self.kv_heads * self.width) for _ in range(2))

    def key_head(self, head: int) -> int:
        return head * self.kv_heads // self.heads

    def part_of_keys(self, projected: Tensor) -> Tensor:
        parts = projected.split(self.width, -1)
        return torch.stack([parts[self.key_head(h)] for h in range(self.heads)], 1)

    def true_scores(self, x: Tensor) -> Tensor:
        return self.part(self.q(x)) @ self.part_of_keys(self.k(x)).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.part_of_keys(self.v(x))

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])

    def three(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return q, k, v


GROUP = {0: frozenset({0, 1, 2})}
EACH = {0: frozenset({1, 4})}


@zoo(THEME, "grouped, enable_gqa", cut=GROUP)
class EnableGqa(Grouped):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(o.transpose(1, 2).flatten(2))


@zoo(THEME, "grouped, repeat_interleave", cut=EACH)
class Repeated(Grouped):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@zoo(THEME, "grouped, repeated in turns (x-transformers)", cut={0: frozenset({0, 2, 4})})
class InTurns(Grouped):
    """Head h reads key head h % kv_heads."""

    def key_head(self, head: int) -> int:
        return head % self.kv_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x)
        k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@zoo(THEME, "grouped, five axes", cut=GROUP)
class FiveAxes(Grouped):
    """(batch, kv_heads, group, queries, keys)"""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x)
        q = q.unflatten(1, (k.shape[1], -1))
        s = torch.einsum("bkgqd,bkld->bkgql", q, k) * self.scale()
        a = s.masked_fill(ahead(x.shape[1]), -1e9).softmax(-1)
        return self.o(torch.einsum("bkgql,bkld->bqkgd", a, v).flatten(2))


@zoo(THEME, "grouped, group folded into the queries", cut=GROUP)
class FoldedQueries(Grouped):
    """(batch, kv_heads, group x queries, keys): one product per key head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x)
        batch, length = x.shape[:2]
        q = q.reshape(batch, self.kv_heads, -1, self.width)
        s = (q @ k.mT * self.scale()).view(batch, self.heads, length, length)
        a = s.masked_fill(ahead(length), -torch.inf).softmax(-1)
        o = a.view(batch, self.kv_heads, -1, length) @ v
        return self.o(o.view(batch, self.heads, length, self.width).transpose(1, 2).flatten(2))


class MultiQuery(Grouped):
    """One key head for all."""

    kv_heads = 1


@zoo(THEME, "multi-query, broadcast", cut=EACH)
class Broadcast(MultiQuery):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x)
        s = (q @ k.mT * self.scale()).masked_fill(ahead(x.shape[1]), -torch.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


@zoo(THEME, "multi-query, folded bmm (StarCoder)", cut=EACH)
class FoldedBmm(MultiQuery):
    """Queries x heads is one axis: (batch, queries * heads, keys)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length * self.heads, self.width)
        s = torch.bmm(q, self.k(x).mT).view(batch, length, self.heads, length) * self.scale()
        a = s.masked_fill(ahead(length)[:, None], -torch.inf).softmax(-1)
        o = torch.bmm(a.view(batch, length * self.heads, length), self.v(x))
        return self.o(o.view(batch, length, -1))


@zoo(THEME, "keys wider than values", cut={0: frozenset({1})})
class OtherWidth(Attention):
    def build(self) -> None:
        self.q, self.k = (nn.Linear(self.d_model, self.heads * 9) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        q, k = (torch.stack(f(x).split(9, -1), 1) for f in (self.q, self.k))
        return q @ k.mT / 3


@zoo(THEME, "latent attention (DeepSeek)", cut={0: frozenset({1})})
class Latent(Attention):
    """Keys and values come out of one narrow projection; a rotary part of the keys is shared by all heads."""

    kinds = ("causal",)

    def build(self) -> None:
        self.down, self.up = nn.Linear(self.d_model, 7 + 4), nn.Linear(7, self.heads * 12)
        self.q = nn.Linear(self.d_model, self.heads * 10)
        self.k = self.v = nn.Linear(1, 1)

    def turned(self, t: Tensor) -> Tensor:
        angle = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=t.dtype)
        a, b = t.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.down(x).split([7, 4], -1)
        k, v = self.up(latent).unflatten(-1, (self.heads, 12)).transpose(1, 2).split([6, 6], -1)
        q, r = self.q(x).unflatten(-1, (self.heads, 10)).transpose(1, 2).split([6, 4], -1)
        keys = torch.cat([k, self.turned(shared).unsqueeze(1).expand(-1, self.heads, -1, -1)], -1)
        queries = torch.cat([q, self.turned(r)], -1)
        return self.o(
            F.scaled_dot_product_attention(queries, keys, v, is_causal=True).transpose(1, 2).flatten(2)
        )

    def true_scores(self, x: Tensor) -> Tensor:
        both = self.down(x)
        k = torch.stack([t[..., :6] for t in self.up(both[..., :7]).split(12, -1)], 1)
        q = torch.stack(self.q(x).split(10, -1), 1)
        rotary = torch.stack(
            [self.turned(q[:, h, :, 6:]) @ self.turned(both[..., 7:]).mT for h in range(self.heads)], 1
        )
        return (q[..., :6] @ k.mT + rotary) * 10**-0.5

    def true_values(self, x: Tensor) -> Tensor:
        return torch.stack([t[..., 6:] for t in self.up(self.down(x)[..., :7]).split(12, -1)], 1)

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])


@zoo(THEME, "grouped queries: many key heads for one query head")
class ManyKeys(Attention):
    """Every head has its own keys and values, the queries are one for all (EfficientViT-like, MLLA)."""

    def build(self) -> None:
        self.q = nn.Linear(self.d_model, self.width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unsqueeze(1)
        k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        return self.o(((q @ k.mT * self.scale()).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        return torch.stack([self.q(x) @ k.mT for k in self.part(self.k(x)).unbind(1)], 1) * self.scale()


class TwoValues(Attention):
    """The same weights on two sets of values, one after the other."""

    def build(self) -> None:
        self.v2 = nn.Linear(self.d_model, self.heads * self.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        w = self.v2(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.o(((a @ v) + (a @ w)).transpose(1, 2).flatten(2))

    def true_values(self, x: Tensor) -> Tensor:
        return self.part(self.v(x)) + self.part(self.v2(x))

    def plain(self, inputs: Any, silent: Any) -> tuple[Tensor, list[Truth]]:
        out, truths = super().plain(inputs, silent)
        truths[0].outputs = None  # of which of the two, nobody says
        return out, truths


add(THEME, "the same weights on two sets of values", TwoValues)
