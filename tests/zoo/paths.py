"""Modules that take another code path for long sequences than for short ones."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from torch import Tensor
from torch.nn import functional as F

THEME = "code paths"
LIMIT = 40  # tokens, above which the other path is taken


class TwoPaths(Attention):
    """Plain for short sequences; subclasses write `long`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        long = x.shape[1] > LIMIT
        y = self.long(q, k, v) if long else F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))

    def long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


@zoo(THEME, "long: heads before the batch, folded, fused")
class FoldHeadsFirst(TwoPaths):
    def long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = q.shape[0]
        folded = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*folded)
        return y.unflatten(0, (self.heads, batch)).transpose(0, 1)


@zoo(THEME, "long: heads before the batch, folded, batch = heads", size=(4, 11), longer=(4, 90))
class FoldSquare(FoldHeadsFirst):
    pass


@zoo(THEME, "long: chunks of queries, fused")
class ChunksOfQueries(TwoPaths):
    def long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([F.scaled_dot_product_attention(piece, k, v) for piece in q.split(32, 2)], 2)


@zoo(THEME, "long: chunks of queries, already in the first batch", size=(2, 77), longer=(3, 11))
class ChunksAtOnce(ChunksOfQueries):
    pass


@zoo(THEME, "long: one head after the other, by hand")
class HeadsInTurn(TwoPaths):
    def long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
        return torch.stack([(a @ b.mT * self.scale()).softmax(-1) @ c for a, b, c in heads], 1)


@zoo(THEME, "long: exp and sum by hand")
class ExpSum(TwoPaths):
    def long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.exp2(q @ k.mT * self.scale() * 1.4426950408889634)
        return scores / scores.sum(-1, keepdim=True) @ v


class ByHand(TwoPaths):
    """Both paths by hand, in functions of as many axes."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        if x.shape[1] > LIMIT:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        y = (q @ k.mT * self.scale()).softmax(-1) @ v
        y = y.transpose(0, 1) if x.shape[1] > LIMIT else y
        return self.o(y.transpose(1, 2).flatten(2))


@zoo(THEME, "long: heads before the batch, by hand")
class HandHeadsFirst(ByHand):
    pass


@zoo(THEME, "long: heads before the batch, by hand, batch = heads", size=(4, 11), longer=(4, 90))
class HandSquare(ByHand):
    pass


@zoo(THEME, "one sample: no batch axis", size=(3, 11), longer=(1, 12))
class OneSample(TwoPaths):
    """A batch of one is run without its axis."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        if x.shape[0] == 1:
            y = ((q[0] @ k[0].mT * self.scale()).softmax(-1) @ v[0])[None]
        else:
            y = (q @ k.mT * self.scale()).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


@zoo(THEME, "long: other letters in the einsum, batch = heads", size=(4, 11), longer=(4, 90))
class OtherLetters(TwoPaths):
    """The same functions in the same order; only the equation puts heads before the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3) for t in self.split(x))
        scores = "hbqk" if x.shape[1] > LIMIT else "bhqk"
        weights = (torch.einsum(f"hbqd,hbkd->{scores}", q, k) * self.scale()).softmax(-1)
        return self.o(torch.einsum(f"{scores},hbkd->bqhd", weights, v).flatten(2))
