"""Where the heads of a module come from: widths, shared projections, norms, other layers in one matrix."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.case import Silent, Truth
from tests.zoo.flows import merged
from tests.zoo.weights import softmax
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

THEME = "origins"


@zoo(THEME, "heads of unequal widths, in a loop", cut={0: frozenset({1})})
class UnequalWidths(Attention):
    widths = (4, 8, 3, 9)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(*(f(x).split(self.widths, -1) for f in (self.q, self.k, self.v)), strict=True)
        return self.o(torch.cat([(q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v for q, k, v in parts], -1))

    def true_scores(self, x: Tensor) -> Tensor:
        q, k = self.q(x).split(self.widths, -1), self.k(x).split(self.widths, -1)
        return torch.stack([a @ b.mT * a.shape[-1] ** -0.5 for a, b in zip(q, k, strict=True)], 1)

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        weights = self.true_weights(inputs)
        given = [weights[:, h] @ part for h, part in enumerate(self.v(inputs).split(self.widths, -1))]
        given = [part * 0 if h in silent.get(0, ()) else part for h, part in enumerate(given)]
        return self.o(torch.cat(given, -1)), [
            Truth("attn", weights, ("self",), torch.arange(inputs.shape[1]), scattered=True)
        ]


@zoo(THEME, "projections as one parameter of three axes (heads, d_model, width)")
class ThreeAxes(Attention):
    def build(self) -> None:
        del self.q, self.k, self.v, self.o
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.randn(self.heads, self.d_model, self.width) * 0.3) for _ in range(3)
        )
        self.wo = nn.Parameter(torch.randn(self.heads, self.width, self.d_model) * 0.3)
        self.q = self.k = nn.Identity()
        self.q.weight = torch.zeros(1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,hdw->bhnw", x, w) for w in (self.wq, self.wk, self.wv))
        o = F.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bhnw,hwd->bnd", o, self.wo)

    def true_scores(self, x: Tensor) -> Tensor:
        return (
            torch.stack([(x @ a) @ (x @ b).mT for a, b in zip(self.wq, self.wk, strict=True)], 1)
            * self.scale()
        )

    def true_values(self, x: Tensor) -> Tensor:
        return torch.stack([x @ w for w in self.wv], 1)

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return sum(given[:, h] @ self.wo[h] for h in range(self.heads))  # type: ignore[return-value]


@zoo(THEME, "collaborative heads: shared queries and keys, mixed by a vector of each head")
class Collaborative(Attention):
    def build(self) -> None:
        self.mixing = nn.Parameter(torch.randn(self.heads, self.heads * self.width))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        v = self.v(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
        s = (q[:, None] * self.mixing[:, None]) @ k[:, None].mT * self.scale() / 4
        return self.o(merged(s.softmax(-1) @ v))

    def true_scores(self, x: Tensor) -> Tensor:
        return torch.einsum("bnc,hc,bmc->bhnm", self.q(x), self.mixing, self.k(x)) * self.scale() / 4


@zoo(THEME, "one projection for all heads, told apart by their biases of distance only")
class ByDistanceOnly(Attention):
    def build(self) -> None:
        self.q, self.k = (nn.Linear(self.d_model, self.width) for _ in range(2))
        self.slopes = nn.Parameter(torch.tensor([0.0, 0.3, 1.0, 3.0]))

    def bias(self, n: int) -> Tensor:
        i = torch.arange(n)
        return -self.slopes[:, None, None] * (i[:, None] - i).abs()

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x)[:, None], self.k(x)[:, None]
        v = self.v(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
        return self.o(merged((q @ k.mT * self.scale() + self.bias(x.shape[1])).softmax(-1) @ v))

    def true_scores(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT * self.scale())[:, None] + self.bias(x.shape[1])


@zoo(THEME, "queries and keys of one projection (Reformer)")
class SharedQueryKey(Attention):
    def build(self) -> None:
        self.k = self.q

    def forward(self, x: Tensor) -> Tensor:
        q, v = (f(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for f in (self.q, self.v))
        return self.o(merged(F.scaled_dot_product_attention(q, q, v)))


@zoo(THEME, "projections with a weight norm")
class WeightNormed(Attention):
    def build(self) -> None:
        self.k = parametrizations.weight_norm(self.k)
        self.v = parametrizations.weight_norm(self.v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))


@zoo(THEME, "queries and keys normed over all heads (OLMo 2)")
class NormedOverHeads(Attention):
    def build(self) -> None:
        inner = self.heads * self.width
        self.nq, self.nk = nn.RMSNorm(inner), nn.RMSNorm(inner)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.nq(self.q(x)), self.nk(self.k(x)), self.v(x)
        q, k, v = (t.view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))

    def true_scores(self, x: Tensor) -> Tensor:
        def normed(t: Tensor) -> Tensor:
            return t / (t.square().mean(-1, keepdim=True) + torch.finfo(t.dtype).eps).sqrt()

        return self.part(normed(self.q(x))) @ self.part(normed(self.k(x))).mT * self.scale()


@zoo(THEME, "a norm of its own for the queries of each head")
class NormOfEach(Attention):
    def build(self) -> None:
        self.norms = nn.ModuleList(nn.LayerNorm(self.width) for _ in range(self.heads))
        with torch.no_grad():
            for norm in self.norms:
                norm.weight.normal_(1, 0.5)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q = torch.stack([norm(q[:, :, h]) for h, norm in enumerate(self.norms)], 1)
        return self.o(merged(F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))))

    def true_scores(self, x: Tensor) -> Tensor:
        q = self.part(self.q(x))
        q = (q - q.mean(-1, keepdim=True)) / (q.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        weight = torch.stack([norm.weight for norm in self.norms])  # type: ignore[misc]
        bias = torch.stack([norm.bias for norm in self.norms])  # type: ignore[misc]
        return (q * weight[:, None] + bias[:, None]) @ self.part(self.k(x)).mT * self.scale()


@zoo(THEME, "attention and feed-forward read by one matrix (ViT-22B)")
class Parallel(Attention):
    def build(self) -> None:
        inner = self.heads * self.width
        self.up, self.o = nn.Linear(self.d_model, 31), nn.Linear(inner + 31, self.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(torch.cat([merged(F.scaled_dot_product_attention(q, k, v)), F.gelu(self.up(x))], -1))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return self.o(torch.cat([*given.unbind(1), F.gelu(self.up(x))], -1))


@zoo(THEME, "all from one projection, feed-forward between queries and keys")
class Interleaved(Attention):
    def build(self) -> None:
        inner = self.heads * self.width
        self.all = nn.Linear(self.d_model, 3 * inner + 13)
        self.o = nn.Linear(inner + 13, self.d_model)

    def pieces(self, x: Tensor) -> list[Tensor]:
        inner = self.heads * self.width
        return list(self.all(x).split([inner, 13, inner, inner], -1))

    def forward(self, x: Tensor) -> Tensor:
        q, up, k, v = self.pieces(x)
        q, k, v = (t.view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        return self.o(torch.cat([up.relu(), merged(F.scaled_dot_product_attention(q, k, v))], -1))

    def true_scores(self, x: Tensor) -> Tensor:
        q, _, k, _ = self.pieces(x)
        return self.part(q) @ self.part(k).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.part(self.pieces(x)[3])

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return self.o(torch.cat([self.pieces(x)[1].relu(), *given.unbind(1)], -1))


@zoo(THEME, "values shared by all heads, queries and keys not", cut={0: frozenset()})
class SharedValues(Attention):
    def build(self) -> None:
        self.v = nn.Linear(self.d_model, self.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for f in (self.q, self.k))
        v = self.v(x)[:, None].expand(-1, self.heads, -1, -1)
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))

    def true_values(self, x: Tensor) -> Tensor:
        return self.v(x)[:, None].expand(-1, self.heads, -1, -1)


@zoo(
    THEME,
    "heads of two scales: pooled keys for half of them",
    longer=(2, 92),
    size=(3, 12),
    cut={0: frozenset({1})},
)
class TwoScales(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        small = [t[:, 2:].unflatten(2, (-1, 2)).mean(3) for t in (k, v)]
        o = [
            F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2]),
            F.scaled_dot_product_attention(q[:, 2:], *small),
        ]
        return self.o(merged(torch.cat(o, 1)))

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        q, k, v = self.part(self.q(inputs)), self.part(self.k(inputs)), self.part(self.v(inputs))
        pk, pv = (t[:, 2:].unflatten(2, (-1, 2)).mean(3) for t in (k, v))
        near = softmax(q[:, :2] @ k[:, :2].mT * self.scale())
        far = softmax(q[:, 2:] @ pk.mT * self.scale())
        given = torch.cat([near @ v[:, :2], far @ pv], 1)
        for h in silent.get(0, ()):
            given[:, h] = 0
        for h in silent.get(1, ()):
            given[:, 2 + h] = 0
        truths = [
            Truth("attn", near, ("self",), torch.arange(inputs.shape[1])),
            Truth("attn", far, ("cross", "self"), None, vague=True),
        ]
        return self.true_join(inputs, given), truths
