"""More of what models do to their weights after the softmax, and to the values behind them."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.case import Truth
from tests.zoo.flows import Joined, merged
from tests.zoo.masks import ahead
from tests.zoo.weights import Changed, softmax
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "reweighted"


@zoo(THEME, "plus the identity")
class PlusIdentity(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return s.softmax(-1) + torch.eye(s.shape[-1])

    def true_weights(self, x: Tensor) -> Tensor:
        return super().true_weights(x) + torch.eye(x.shape[1], dtype=x.dtype)


@zoo(THEME, "minus the mean over the keys")
class Centred(Changed):
    vague = True

    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        return a - a.mean(-1, keepdim=True)

    def true_weights(self, x: Tensor) -> Tensor:
        return super().true_weights(x) - 1 / x.shape[1]


@zoo(THEME, "averaged with the transpose")
class Symmetric(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        return 0.5 * (a + a.mT)

    def true_weights(self, x: Tensor) -> Tensor:
        a = super().true_weights(x)
        return (a + a.mT) / 2


@zoo(THEME, "a convolution over the map of each head")
class ConvolvedMap(Changed):
    def build(self) -> None:
        self.conv = nn.Conv2d(self.heads, self.heads, 3, padding=1, groups=self.heads, bias=False)
        with torch.no_grad():
            self.conv.weight.abs_()

    def weigh(self, s: Tensor) -> Tensor:
        return self.conv(s.softmax(-1))

    def true_weights(self, x: Tensor) -> Tensor:
        n, padded = x.shape[1], F.pad(super().true_weights(x), (1, 1, 1, 1))
        kernel = self.conv.weight[:, 0, :, :, None, None]
        return sum(
            (kernel[:, i, j] * padded[:, :, i : i + n, j : j + n] for i in range(3) for j in range(3)),
            torch.zeros(()),
        )


@zoo(THEME, "mixed over the heads, then a batch norm (re-attention, DeepViT)")
class ReAttention(Changed):
    vague = True

    def build(self) -> None:
        self.mix, self.norm = nn.Conv2d(self.heads, self.heads, 1), nn.BatchNorm2d(self.heads)
        with torch.no_grad():
            self.norm.running_mean.uniform_(0, 0.1)
            self.norm.running_var.uniform_(0.5, 1)

    def weigh(self, s: Tensor) -> Tensor:
        return self.norm(self.mix(s.softmax(-1)))

    def true_weights(self, x: Tensor) -> Tensor:
        def column(t: Tensor) -> Tensor:
            return t.view(1, -1, 1, 1)

        mixed = torch.einsum("gh,bhij->bgij", self.mix.weight[:, :, 0, 0], super().true_weights(x))
        norm = self.norm
        centred = mixed + column(self.mix.bias) - column(norm.running_mean)
        return centred / (column(norm.running_var) + norm.eps).sqrt() * column(norm.weight) + column(
            norm.bias
        )


@zoo(THEME, "times a decay by distance of each head, causal")
class Decay(Changed):
    kinds = ("causal",)

    def build(self) -> None:
        self.register_buffer("rates", torch.tensor([0.5, 0.7, 0.9, 0.99]))

    def weigh(self, s: Tensor) -> Tensor:
        i = torch.arange(s.shape[-1])
        decay = self.rates.view(-1, 1, 1) ** (i[:, None] - i).clamp(min=0)
        return s.softmax(-1) * torch.where(ahead(len(i)), 0.0, decay)

    def true_weights(self, x: Tensor) -> Tensor:
        a = super().true_weights(x)
        for h, rate in enumerate(self.rates.tolist()):
            for i in range(x.shape[1]):
                for j in range(x.shape[1]):
                    a[:, h, i, j] *= rate ** (i - j) if j <= i else 0.0
        return a


@zoo(THEME, "times a gate of each key")
class KeyGate(Changed):
    def build(self) -> None:
        self.gate = nn.Linear(self.d_model, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        gates = self.gate(x).sigmoid().transpose(1, 2).unsqueeze(2)
        return self.o(merged((q @ k.mT * self.scale()).softmax(-1) * gates @ v))

    def true_weights(self, x: Tensor) -> Tensor:
        gates = 1 / (1 + (-self.gate(x)).exp())
        return (
            super().true_weights(x) * torch.stack([gates[..., h] for h in range(self.heads)], 1)[:, :, None]
        )


@zoo(THEME, "rows and columns normalised in turn (Sinkhorn)")
class Sinkhorn(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        for _ in range(3):
            a = F.normalize(a, p=1, dim=-2)
            a = F.normalize(a, p=1, dim=-1)
        return a

    def true_weights(self, x: Tensor) -> Tensor:
        a = super().true_weights(x)
        for axis in (-2, -1) * 3:
            a = a / a.sum(axis, keepdim=True)
        return a


@zoo(THEME, "two softmaxes of near and far keys, and a gate of each head")
class NearAndFar(Changed):
    def build(self) -> None:
        self.gate = nn.Parameter(torch.randn(self.heads))

    @staticmethod
    def near(n: int) -> Tensor:
        i = torch.arange(n)
        return (i[:, None] - i).abs() < 3

    def weigh(self, s: Tensor) -> Tensor:
        near, gate = self.near(s.shape[-1]), self.gate.sigmoid().view(-1, 1, 1)
        close = s.masked_fill(~near, -torch.inf).softmax(-1)
        return gate * close + (1 - gate) * s.masked_fill(near, -torch.inf).softmax(-1)

    def true_weights(self, x: Tensor) -> Tensor:
        s, near = self.true_scores(x), self.near(x.shape[1])
        gate = (1 / (1 + (-self.gate).exp()))[:, None, None]
        parts = [softmax(s.masked_fill(hidden, -torch.inf)) for hidden in (~near, near)]
        return gate * parts[0] + (1 - gate) * parts[1]


@zoo(THEME, "values are made of a latent behind the weights (DeepSeek, absorbed)")
class Absorbed(Attention):
    kinds = ("causal",)
    latent = 7

    def build(self) -> None:
        self.down = nn.Linear(self.d_model, self.latent, bias=False)
        self.up_keys = nn.Parameter(torch.randn(self.heads, self.width, self.latent))
        self.up_values = nn.Parameter(torch.randn(self.heads, self.latent, self.width) * 0.4)
        self.k = self.v = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        c, q = self.down(x), self.q(x).unflatten(-1, (-1, self.width))
        s = torch.einsum("bhqc,bkc->bhqk", torch.einsum("bqhd,hdc->bhqc", q, self.up_keys), c) * self.scale()
        a = s.masked_fill(ahead(x.shape[1]), -torch.inf).softmax(-1)
        o = torch.einsum("bhqk,bkc->bhqc", a, c)
        return self.o(torch.einsum("bhqc,hcd->bqhd", o, self.up_values).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        keys = torch.stack([self.down(x) @ up.T for up in self.up_keys], 1)
        return self.part(self.q(x)) @ keys.mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return torch.stack([self.down(x) @ up for up in self.up_values], 1)

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])

    def finish(self, truth: Truth) -> Truth:
        truth.outputs = None  # of the latent, or of the values: nobody says
        return truth


@zoo(THEME, "heads weighed by a softmax over tokens' routes (mixture of heads)")
class Routed(Joined):
    """Where a head is cut, the softmax over heads gives the others more: that is not silence."""

    def build(self) -> None:
        self.route = nn.Linear(self.d_model, self.heads)

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o((o.transpose(1, 2) * self.route(x).softmax(-1).unsqueeze(-1)).flatten(2))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        shares = softmax(self.route(x))
        return super().true_join(x, given * torch.stack(shares.unbind(-1), 1)[..., None])
