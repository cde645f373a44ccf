"""Queries, keys and values that are more than a linear map of the input."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.case import Silent, Truth
from tests.zoo.flows import merged
from tests.zoo.masks import ahead
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "projections"


@zoo(THEME, "values that are no linear map (silu, centred)")
class NonlinearValues(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        v = F.silu(v) * v.mean(2, keepdim=True)
        return self.o(merged((q @ k.mT * self.scale()).softmax(-1) @ v))

    def true_values(self, x: Tensor) -> Tensor:
        v = self.part(self.v(x))
        return v / (1 + (-v).exp()) * v.mean(2, keepdim=True)


@zoo(THEME, "values are the input itself, no projection")
class NoValues(Attention):
    """Each head weighs the whole input; the outputs are concatenated (AFNO-like, GAT)."""

    heads, width, d_model = 3, 7, 7

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged((q @ k.mT * self.scale()).softmax(-1) @ x.unsqueeze(1)))

    def true_values(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.heads, 1)


@zoo(THEME, "projections are convolutions (CvT)")
class ConvProjections(Attention):
    def build(self) -> None:
        inner = self.heads * self.width
        self.conv = nn.ModuleList(nn.Conv1d(self.d_model, inner, 3, padding=1) for _ in range(3))
        with torch.no_grad():
            self.conv[0].weight.mul_(3)
        self.q = self.k = self.v = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x.mT).unflatten(1, (self.heads, self.width)).mT for f in self.conv)
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))

    def convolved(self, x: Tensor, n: int) -> Tensor:
        wide, w = F.pad(x, (0, 0, 1, 1)), self.conv[n].weight
        return self.part(sum(wide[:, i : i + x.shape[1]] @ w[..., i].T for i in range(3)) + self.conv[n].bias)

    def true_scores(self, x: Tensor) -> Tensor:
        return self.convolved(x, 0) @ self.convolved(x, 1).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.convolved(x, 2)


@zoo(THEME, "scores of two products (disentangled, Transformer-XL)")
class TwoProducts(Attention):
    """q k plus r k of relative positions, added before the softmax."""

    def build(self) -> None:
        self.places = nn.Parameter(torch.randn(256, self.heads, self.width))
        self.u, self.w = (nn.Parameter(torch.randn(self.heads, self.width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        i = torch.arange(x.shape[1])
        r = self.places[i[:, None] - i + 128]  # (queries, keys, heads, width)
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        place = torch.einsum("bihd,ijhd->bhij", q + self.w, r)
        a = ((content + place) * self.scale()).softmax(-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", a, v).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        q, k, i = self.part(self.q(x)), self.part(self.k(x)), torch.arange(x.shape[1])
        out = []
        for h in range(self.heads):
            r = self.places[:, h][i[:, None] - i + 128]
            out.append((q[:, h] + self.u[h]) @ k[:, h].mT + ((q[:, h] + self.w[h])[:, :, None] * r).sum(-1))
        return torch.stack(out, 1) * self.scale()


@zoo(THEME, "relative positions in the values, too (Shaw)")
class ShawValues(Attention):
    """Attention gives weights @ values plus weights @ places: a silent head gives neither."""

    def build(self) -> None:
        self.places = nn.Parameter(torch.randn(256, self.width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        i = torch.arange(x.shape[1])
        a = (q @ k.mT * self.scale()).softmax(-1)
        o = a @ v + torch.einsum("bhij,ijd->bhid", a, self.places[i[:, None] - i + 128])
        return self.o(merged(o))

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        i = torch.arange(x.shape[1])
        weights = self.true_weights(x)
        given = weights @ self.true_values(x)
        given = given + (weights.unsqueeze(-1) * self.places[i[:, None] - i + 128]).sum(3)
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        return self.true_join(x, given), [Truth("attn", weights, own=i)]


@zoo(THEME, "rotary by complex numbers")
class Rotary(Attention):
    kinds = ("causal",)

    def angles(self, length: int) -> Tensor:
        return torch.arange(length)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=self.q.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        turn = torch.polar(torch.ones(x.shape[1], 3), self.angles(x.shape[1]))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.contiguous().unflatten(-1, (3, 2))) * turn).flatten(3)
            for t in (q, k)
        )
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def true_scores(self, x: Tensor) -> Tensor:
        angle, parts = self.angles(x.shape[1]), []
        for f in (self.q, self.k):
            t = self.part(f(x))
            a, b = t[..., ::2], t[..., 1::2]
            parts.append(
                torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
            )
        return parts[0] @ parts[1].mT * self.scale()

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])
