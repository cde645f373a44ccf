"""Where the heads are: every order of axes, folds, loops, packings."""

from __future__ import annotations

import math

import torch
from tests.zoo.base import Attention, add, zoo
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "axes"


class Textbook(Attention):
    """(batch, heads, length, width), fused: what custom has."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


add(THEME, "textbook, fused", Textbook)
add(THEME, "textbook, batch = heads", Textbook, size=(4, 11))
add(THEME, "textbook, length = heads", lambda: Textbook(5), size=(3, 5))
add(THEME, "textbook, width = length = batch", lambda: Textbook(4, 7), size=(7, 7))
add(THEME, "textbook, all equal", lambda: Textbook(4, 4, 16), size=(4, 4))


class ByHand(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = torch.softmax(q @ k.transpose(-1, -2) * self.scale(), -1)
        return self.o((a @ v).transpose(1, 2).flatten(2))


add(THEME, "by hand", ByHand)
add(THEME, "by hand, batch = heads = length", lambda: ByHand(5), size=(5, 5))


class HeadsFirst(Attention):
    """(heads, batch, length, width)"""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).permute(1, 2, 0, 3).flatten(2))


add(THEME, "heads first", HeadsFirst)
add(THEME, "heads first, batch = heads", HeadsFirst, size=(4, 11))
add(THEME, "heads first, batch = 1", HeadsFirst, size=(1, 11))


@zoo(THEME, "heads first, fused", size=(5, 11))
class HeadsFirstFused(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3) for t in self.split(x))
        return self.o(F.scaled_dot_product_attention(q, k, v).permute(1, 2, 0, 3).flatten(2))


class HeadsTimesBatch(Attention):
    """(heads * batch, length, width): the first port of "Attention is all you need"."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.permute(2, 0, 1, 3).reshape(-1, length, self.width) for t in self.split(x))
        a = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.width)).softmax(2)
        o = torch.bmm(a, v).view(self.heads, batch, length, self.width)
        return self.o(o.permute(1, 2, 0, 3).reshape(batch, length, -1))


add(THEME, "heads x batch", HeadsTimesBatch)
add(THEME, "heads x batch, batch = heads", HeadsTimesBatch, size=(4, 13))


class BatchTimesHeads(Attention):
    """(batch * heads, length, width): fairseq."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.transpose(1, 2).reshape(-1, length, self.width) for t in self.split(x))
        a = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), alpha=self.scale()).softmax(-1)
        o = torch.bmm(a, v).view(batch, self.heads, length, self.width)
        return self.o(o.transpose(1, 2).reshape(batch, length, -1))


add(THEME, "batch x heads", BatchTimesHeads)
add(THEME, "batch x heads, batch = 1", BatchTimesHeads, size=(1, 13))
add(THEME, "batch x heads, batch = heads", BatchTimesHeads, size=(4, 13))


@zoo(THEME, "length first, (length, batch, d)")
class LengthFirst(Attention):
    """Inside, sequences stand in columns, and heads are folded with the batch as fairseq does."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        length, batch, _ = x.shape
        q, k, v = (
            f(x).view(length, batch * self.heads, self.width).transpose(0, 1)
            for f in (self.q, self.k, self.v)
        )
        a = F.softmax(torch.bmm(q, k.transpose(1, 2)) * self.scale(), dim=-1)
        o = torch.bmm(a, v).transpose(0, 1).reshape(length, batch, -1)
        return self.o(o).transpose(0, 1)


@zoo(THEME, "five axes, two of them heads")
class FiveAxes(Attention):
    """(batch, 2, heads / 2, length, width)"""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (2, -1)).permute(0, 2, 3, 1, 4) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).permute(0, 3, 1, 2, 4).flatten(2))


@zoo(THEME, "five axes, an axis of one", size=(4, 11))
class FiveAxesOne(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3).unsqueeze(1) for t in self.split(x))  # (heads, 1, batch, ...)
        return self.o(((q @ k.mT * self.scale()).softmax(-1) @ v).squeeze(1).permute(1, 2, 0, 3).flatten(2))


@zoo(THEME, "einsum, heads in the middle (b q h k)")
class HeadsMiddle(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        a = torch.einsum("bqhd,bkhd->bqhk", q, k).mul(self.scale()).softmax(-1)
        return self.o(torch.einsum("bqhk,bkhd->bqhd", a, v).flatten(2))


@zoo(THEME, "einsum, heads last (b q k h)")
class HeadsLast(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        a = torch.einsum("bqhd,bkhd->bqkh", q, k).mul(self.scale()).softmax(2)
        return self.o(torch.einsum("bqkh,bkhd->bqhd", a, v).flatten(2))


@zoo(THEME, "einsum, keys before queries (b h k q), length = heads", size=(3, 4))
class KeysFirst(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        a = torch.einsum("znhd,zmhd->zhmn", q, k).mul(self.scale()).softmax(2)
        return self.o(torch.einsum("zhmn,zmhd->znhd", a, v).flatten(2))


@zoo(THEME, "einsum with letters that lie (h is length)")
class LyingLetters(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = torch.einsum("qbhd,qbwd->qbhw", q, k).mul(self.scale()).softmax(-1)
        return self.o(torch.einsum("qbhw,qbwd->qbhd", a, v).transpose(1, 2).flatten(2))


@zoo(THEME, "einsum, projection in the same product")
class ThreeFactors(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        a = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(self.scale()).softmax(-1)
        weight = self.o.weight.unflatten(1, (self.heads, self.width))
        return torch.einsum("bhqk,bkhd,ehd->bqe", a, v, weight) + self.o.bias


class Interleaved(Attention):
    """Head h has the columns h, h + heads, h + 2 heads ...: (batch, length, width, heads)."""

    def columns(self, head: int) -> Tensor:
        return torch.arange(head, self.heads * self.width, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:2], self.width, self.heads).permute(0, 3, 1, 2)
            for f in (self.q, self.k, self.v)
        )
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).permute(0, 2, 3, 1).flatten(2))


add(THEME, "interleaved heads", Interleaved)
add(THEME, "interleaved heads, width = heads", lambda: Interleaved(5, 5), size=(5, 11))


class Packed(Attention):
    """One projection for queries, keys and values, per head one after the other (GPT-NeoX)."""

    def build(self) -> None:
        self.qkv = nn.Linear(self.d_model, 3 * self.heads * self.width)
        with torch.no_grad():
            self.qkv.weight.mul_(2.0)
        del self.q, self.k, self.v
        self.q = self.k = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3, self.width).permute(3, 0, 2, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def projected(self, x: Tensor, part: int) -> Tensor:
        w, all_columns = self.width, self.qkv(x)
        return torch.stack(
            [all_columns[..., (3 * h + part) * w : (3 * h + part + 1) * w] for h in range(self.heads)], 1
        )

    def true_scores(self, x: Tensor) -> Tensor:
        return self.projected(x, 0) @ self.projected(x, 1).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.projected(x, 2)


add(THEME, "packed by head", Packed)
add(THEME, "packed by head, heads = 3", lambda: Packed(3, 7), size=(3, 11))


@zoo(THEME, "channels first (batch, d, length), keys x queries")
class ChannelsFirst(Attention):
    """As in U-Nets: (batch, channels, length) all the way, weights transposed."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).mT.unflatten(1, (self.heads, self.width)) for f in (self.q, self.k, self.v))
        a = (k.mT @ q * self.scale()).softmax(-2)  # (batch, heads, keys, queries)
        return self.o((v @ a).flatten(1, 2).mT)


@zoo(THEME, "products as sums of elementwise ones")
class Elementwise(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        s = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * self.scale()
        a = s.softmax(-1)
        return self.o((a.unsqueeze(-1) * v.unsqueeze(2)).sum(3).transpose(1, 2).flatten(2))
