"""How the products of weights and values are written."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.flows import merged
from torch import Tensor
from torch.nn import functional as F

THEME = "products"


@zoo(THEME, "baddbmm and bmm on folded heads")
class Baddbmm(Attention):
    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in self.split(x))
        s = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0.0, alpha=self.scale())
        return self.o(merged(torch.bmm(s.softmax(-1), v).view(b, self.heads, n, -1)))


@zoo(THEME, "values by F.linear, one sample and head at a time")
class ByLinear(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        rows = [
            torch.stack([F.linear(w, u.mT) for w, u in zip(p, z, strict=True)])
            for p, z in zip(a, v, strict=True)
        ]
        return self.o(merged(torch.stack(rows)))


@zoo(THEME, "values by tensordot of weights and all values, diagonal taken")
class ByTensordot(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        o = torch.tensordot(a.flatten(0, 1), v.flatten(0, 1), dims=([2], [1]))  # (bh, q, bh, w)
        return self.o(merged(o.diagonal(dim1=0, dim2=2).movedim(-1, 0).view(*q.shape)))


@zoo(THEME, "weights and values by multiplication and sum")
class ByProducts(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o(merged((a[..., None] * v[:, :, None]).sum(-2)))


@zoo(THEME, "sparse: weights of top keys, values gathered")
class Gathered(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        top = (q @ k.mT * self.scale()).topk(3, -1)
        a = top.values.softmax(-1)
        chosen = (
            v[:, :, None]
            .expand(-1, -1, q.shape[2], -1, -1)
            .gather(3, top.indices[..., None].expand(-1, -1, -1, -1, v.shape[-1]))
        )
        return self.o(merged((a[..., None, :] @ chosen)[..., 0, :]))

    def true_hidden(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        return s < s.topk(3, -1).values[..., -1:]
