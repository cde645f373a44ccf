"""Blocks and bands that read their neighbours."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Truth, View
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "bands"


class Banded(Attention):
    """Each query reads the `reach` keys on either side, which `unfold` laid out for it."""

    reach = 2
    vague = True

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i - i[:, None]).abs() > self.reach

    def finish(self, truth: Truth) -> Truth:
        """Also as the band alone: (batch, heads, length, 2 reach + 1), the query in the middle."""
        length, n = truth.weights.shape[-1], self.reach
        wide = F.pad(truth.weights, (n, n))
        band = torch.stack([wide[:, :, i, i : i + 2 * n + 1] for i in range(length)], 2)
        counted = torch.ones(band.shape[0], length, dtype=torch.bool)
        truth.views.append(View(band, torch.full((length,), n), counted, first=False))
        return truth


class Unfolded(Banded):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        n = self.reach
        k, v = (F.pad(t, (0, 0, n, n)).unfold(2, 2 * n + 1, 1) for t in (k, v))  # (b, h, length, d, window)
        i = torch.arange(x.shape[1])[:, None] + torch.arange(-n, n + 1)
        outside = (i < 0) | (i >= x.shape[1])
        s = torch.einsum("bhld,bhldw->bhlw", q, k) * self.scale()
        a = s.masked_fill(outside, -torch.inf).softmax(-1)
        return self.o(torch.einsum("bhlw,bhldw->bhld", a, v).transpose(1, 2).flatten(2))


add(THEME, "sliding window by unfold", Unfolded)
add(THEME, "sliding window by unfold, window = length = heads + 1", Unfolded, size=(5, 5))


@zoo(THEME, "blocks that also read the one before", size=(3, 15), longer=(2, 35))
class OverlappingBlocks(Attention):
    """Local attention of chunks to themselves and the chunk before."""

    size = 5
    vague = True

    def true_hidden(self, x: Tensor) -> Tensor:
        chunk = torch.arange(x.shape[1]) // self.size
        return (chunk > chunk[:, None]) | (chunk < chunk[:, None] - 1)

    def forward(self, x: Tensor) -> Tensor:
        n = self.size
        q, k, v = (t.transpose(1, 2).unflatten(2, (-1, n)) for t in self.split(x))  # (b, h, chunks, n, d)
        k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], 3) for t in (k, v))
        s = q @ k.mT * self.scale()
        s[:, :, 0, :, :n] = -torch.inf
        return self.o((s.softmax(-1) @ v).flatten(2, 3).transpose(1, 2).flatten(2))

    def finish(self, truth: Truth) -> Truth:
        n, parts = self.size, []
        wide = F.pad(truth.weights, (n, 0))
        for start in range(0, truth.weights.shape[-1], n):
            parts.append(wide[:, :, start : start + n, start : start + 2 * n])
        stacked = torch.stack(parts, 1)  # (batch, chunks, heads, n, 2n)
        counted = torch.ones(stacked.shape[0] * stacked.shape[1], n, dtype=torch.bool)
        for w in (stacked.flatten(0, 1), stacked.transpose(0, 1).flatten(0, 1)):
            truth.views.append(View(w, torch.arange(n, 2 * n), counted, first=False))
        truth.outputs = None
        return truth


@zoo(THEME, "block-sparse: chosen blocks gathered", size=(3, 15), longer=None)
class Gathered(Attention):
    """Each block of queries reads two blocks of keys, chosen by a table: its own and another."""

    vague = True

    def build(self) -> None:
        self.table = nn.Buffer(torch.tensor([[0, 2], [1, 0], [2, 1]]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).unflatten(2, (-1, 5)) for t in self.split(x))
        k, v = (t[:, :, self.table].flatten(3, 4) for t in (k, v))  # (b, h, blocks, 10, d)
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).flatten(2, 3).transpose(1, 2).flatten(2))

    def true_hidden(self, x: Tensor) -> Tensor:
        block = torch.arange(x.shape[1]) // 5
        return ~(self.table[block][..., None] == block).any(1)

    def finish(self, truth: Truth) -> Truth:
        parts = torch.stack([
            torch.cat([truth.weights[:, :, 5 * n : 5 * n + 5, 5 * m : 5 * m + 5] for m in row], -1)
            for n, row in enumerate(self.table.tolist())
        ], 1)  # fmt: skip
        counted = torch.ones(parts.shape[0] * 3, 5, dtype=torch.bool)
        for w in (parts.flatten(0, 1), parts.transpose(0, 1).flatten(0, 1)):
            truth.views.append(View(w, torch.arange(5), counted, first=False))
        truth.outputs = None
        return truth
