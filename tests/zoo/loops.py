"""Heads, samples or queries one after the other."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "loops"


@zoo(THEME, "loop over heads, slices, fused", size=(4, 12))
class LoopSlices(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        heads = [
            F.scaled_dot_product_attention(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
            for i in range(self.heads)
        ]
        return self.o(torch.cat(heads, 1).transpose(1, 2).flatten(2))


@zoo(THEME, "loop over heads, chunk, by hand")
class LoopChunk(Attention):
    def forward(self, x: Tensor) -> Tensor:
        parts = zip(*(f(x).chunk(self.heads, -1) for f in (self.q, self.k, self.v)), strict=True)
        return self.o(torch.cat([(q @ k.mT * self.scale()).softmax(-1) @ v for q, k, v in parts], -1))


@zoo(THEME, "loop over heads, unbind, sum of projections")
class LoopUnbind(Attention):
    """Each head is projected by its columns of the output weight, and the results are added."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        out = self.o.bias.expand(*x.shape[:2], -1)
        weights = self.o.weight.unflatten(1, (self.heads, self.width)).unbind(1)
        for qh, kh, vh, w in zip(q.unbind(2), k.unbind(2), v.unbind(2), weights, strict=True):
            out = out + (torch.softmax(qh @ kh.mT * self.scale(), -1) @ vh) @ w.T
        return out


class OneHead(nn.Module):
    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(d_model, width, bias=False) for _ in range(3))
        with torch.no_grad():
            self.query.weight.mul_(2.5)
            self.key.weight.mul_(2.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


@zoo(THEME, "a ModuleList of single heads")
class ListOfHeads(Attention):
    """Karpathy's lecture: every head is a module with three projections of its own."""

    scattered = True

    def build(self) -> None:
        self.q = self.k = self.v = nn.Linear(1, 1)  # not used
        self.list = nn.ModuleList(OneHead(self.d_model, self.width) for _ in range(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([head(x) for head in self.list], -1))

    def true_scores(self, x: Tensor) -> Tensor:
        return (
            torch.stack([(x @ h.query.weight.T) @ (x @ h.key.weight.T).mT for h in self.list], 1)
            * self.scale()
        )

    def true_values(self, x: Tensor) -> Tensor:
        return torch.stack([x @ h.value.weight.T for h in self.list], 1)


@zoo(THEME, "loop over the batch")
class LoopBatch(Attention):
    def forward(self, x: Tensor) -> Tensor:
        out = []
        for one in x:
            q, k, v = (t.transpose(0, 1) for t in self.split(one))  # (heads, length, width)
            out.append((torch.softmax(q @ k.mT * self.scale(), -1) @ v).transpose(0, 1).flatten(1))
        return self.o(torch.stack(out))


@zoo(THEME, "loop over the batch, batch = heads, fused", size=(4, 11))
class LoopBatchFused(Attention):
    def forward(self, x: Tensor) -> Tensor:
        out = []
        for one in x.split(1):
            q, k, v = (t.transpose(1, 2) for t in self.split(one))
            out.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.o(torch.cat(out))
