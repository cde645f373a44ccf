"""Where queries and keys stand: rolled, reversed, in other samples, in the middle, in several streams."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Silent, Truth
from tests.zoo.flows import merged
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "places"


class Unplaced(Attention):
    """Positions mean nothing, and must not be there."""

    vague = True

    def true_own(self, weights: Tensor) -> Tensor | None:
        return None

    def heads_of(self, projection: nn.Module, x: Tensor) -> Tensor:
        """(batch, heads, length, width)"""
        return projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)


@zoo(THEME, "keys and values rolled by three")
class Rolled(Unplaced):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention(q, k.roll(3, 2), v.roll(3, 2))))

    def true_scores(self, x: Tensor) -> Tensor:
        return super().true_scores(x).roll(3, -1)  # the keys as they stand

    def true_values(self, x: Tensor) -> Tensor:
        return super().true_values(x).roll(3, 2)


@zoo(THEME, "queries from right to left, keys not")
class QueriesReversed(Unplaced):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention(q.flip(2), k, v).flip(2)))

    def true_scores(self, x: Tensor) -> Tensor:
        return super().true_scores(x).flip(2)

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return super().true_join(x, given.flip(2))


@zoo(THEME, "samples read their partners", size=(4, 11), longer=(2, 60))
class Partners(Unplaced):
    kinds = ("cross",)

    @staticmethod
    def swapped(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention(q, self.swapped(k), self.swapped(v))))

    def true_scores(self, x: Tensor) -> Tensor:
        return self.part(self.q(x)) @ self.swapped(self.part(self.k(x))).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.swapped(super().true_values(x))


class OneAsks(Attention):
    """One token asks; ``which`` says which one."""

    vague = True
    kinds = ("self", "causal", "cross")

    def which(self, length: int) -> int:
        raise NotImplementedError

    def one(self, x: Tensor) -> Tensor:
        i = self.which(x.shape[1])
        return x[:, i : i + 1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(t).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for f, t in ((self.q, self.one(x)), (self.k, x), (self.v, x))
        )
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))

    def true_scores(self, x: Tensor) -> Tensor:
        return self.part(self.q(self.one(x))) @ self.part(self.k(x)).mT * self.scale()

    def true_own(self, weights: Tensor) -> Tensor:
        return torch.tensor([self.which(weights.shape[-1])])


@zoo(THEME, "the token in the middle asks")
class MiddleAsks(OneAsks):
    def which(self, length: int) -> int:
        return length // 2


@zoo(THEME, "the last token asks, without a cache")
class LastAsks(OneAsks):
    def which(self, length: int) -> int:
        return length - 1


@zoo(THEME, "pooling: a linear map of each token is its score, by head")
class Pooling(Unplaced):
    kinds = ("self", "cross")

    def build(self) -> None:
        self.score = nn.Linear(self.d_model, self.heads)
        self.q = self.k = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.score(x).transpose(1, 2).unsqueeze(2).softmax(-1)
        return self.o(merged(a @ self.heads_of(self.v, x)))

    def true_scores(self, x: Tensor) -> Tensor:
        return torch.stack([self.score(x)[..., h] for h in range(self.heads)], 1)[:, :, None]


@zoo(THEME, "pooling: a learned query for each head (PMA)")
class LearnedQueries(Unplaced):
    kinds = ("cross",)

    def build(self) -> None:
        self.seeds = nn.Parameter(torch.randn(self.heads, 1, self.width))
        self.q = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.seeds.expand(len(x), -1, -1, -1)
        k, v = self.heads_of(self.k, x), self.heads_of(self.v, x)
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))

    def true_scores(self, x: Tensor) -> Tensor:
        k = self.part(self.k(x))
        return torch.stack([self.seeds[h] @ k[:, h].mT for h in range(self.heads)], 1) * self.scale()


@zoo(THEME, "two streams joined, each with projections of its own (MMDiT)", size=(3, 12))
class Joint(Attention):
    text = 5

    def build(self) -> None:
        inner = self.heads * self.width
        self.q2, self.k2, self.v2 = (nn.Linear(self.d_model, inner) for _ in range(3))
        self.o2 = nn.Linear(inner, self.d_model)

    def joined(self, x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
        return torch.cat([first(x[:, : self.text]), second(x[:, self.text :])], 1)

    def forward(self, x: Tensor) -> Tensor:
        pairs = ((self.q, self.q2), (self.k, self.k2), (self.v, self.v2))
        q, k, v = (self.joined(x, a, b).unflatten(-1, (-1, self.width)).transpose(1, 2) for a, b in pairs)
        return self.joined(merged(F.scaled_dot_product_attention(q, k, v)), self.o, self.o2)

    def true_scores(self, x: Tensor) -> Tensor:
        q, k = self.part(self.joined(x, self.q, self.q2)), self.part(self.joined(x, self.k, self.k2))
        return q @ k.mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.part(self.joined(x, self.v, self.v2))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return self.joined(torch.cat(given.unbind(1), -1), self.o, self.o2)


@zoo(THEME, "memory keys in the middle", size=(3, 12))
class MiddleMemory(Attention):
    """Two learned keys stand between the halves of the sequence."""

    vague = True

    def build(self) -> None:
        self.mk, self.mv = (nn.Parameter(torch.randn(self.heads, 2, self.width)) for _ in range(2))

    @staticmethod
    def between(t: Tensor, memory: Tensor) -> Tensor:
        n = t.shape[2] // 2
        return torch.cat([t[:, :, :n], memory.expand(len(t), -1, -1, -1), t[:, :, n:]], 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        o = F.scaled_dot_product_attention(q, self.between(k, self.mk), self.between(v, self.mv))
        return self.o(merged(o))

    def true_scores(self, x: Tensor) -> Tensor:
        return self.part(self.q(x)) @ self.between(self.part(self.k(x)), self.mk).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.between(super().true_values(x), self.mv)

    def true_own(self, weights: Tensor) -> Tensor:
        i = torch.arange(weights.shape[-2])
        return i + 2 * (i >= len(i) // 2)


class Table(nn.Module):
    """Each number of a row of a table is a token (FT-Transformer); then attention that is not seen."""

    columns = 11

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(self.columns, 23)) for _ in range(2))
        self.seen, self.unseen = Fused(), Relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen(self.seen(x[:, :, None] * self.scale + self.shift))

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        given = [{0: silent.get(n, frozenset())} for n in range(2)]
        y, first = self.seen.plain(x[:, :, None] * self.scale + self.shift, given[0])
        out, second = self.unseen.plain(y, given[1])
        first[0].path, second[0].path = "attn.seen", "attn.unseen"
        return out, [*first, *second]

    def example(self, batch: int, length: int) -> Any:
        return torch.randn(batch, self.columns)


class Fused(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))


class Relu(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged((q @ k.mT * self.scale()).relu() / x.shape[1] @ v))

    def true_weights(self, x: Tensor) -> Tensor:
        return self.true_scores(x).clamp(min=0) / x.shape[1]


add(THEME, "a table whose numbers are tokens, the second attention unseen", Table, longer=None)
