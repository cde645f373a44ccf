"""How scores become weights: softmax in other words, and functions that are no softmax."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.weights import Changed, softmax
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "scores"


@zoo(THEME, "exp / sum by hand")
class ExpSum(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        e = torch.exp(s - s.max(-1, keepdim=True).values)
        return e / e.sum(-1, keepdim=True)


@zoo(THEME, "exp, values first, divided at the end")
class DividedLast(Attention):
    """As flash attention is taught: the sum of the weights is divided out after the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        e = (q @ k.mT * self.scale()).exp()
        return self.o(((e @ v) / e.sum(-1, keepdim=True)).transpose(1, 2).flatten(2))


@zoo(THEME, "logsumexp form")
class LogSumExp(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return (s - s.logsumexp(-1, keepdim=True)).exp()


@zoo(THEME, "log_softmax, then exp")
class LogSoftmax(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return F.log_softmax(s, -1).exp()


@zoo(THEME, "softmax1, a one in the sum")
class Softmax1(Changed):
    """Quiet attention: rows sum to less than one."""

    vague = True

    def weigh(self, s: Tensor) -> Tensor:
        return F.pad(s, (0, 1)).softmax(-1)[..., :-1]

    def true_weights(self, x: Tensor) -> Tensor:
        e = self.true_scores(x).exp()
        return e / (1 + e.sum(-1, keepdim=True))


@zoo(THEME, "sigmoid")
class Sigmoid(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return s.sigmoid()

    def true_weights(self, x: Tensor) -> Tensor:
        return 1 / (1 + (-self.true_scores(x)).exp())


@zoo(THEME, "squared relu (Primer, GAU)")
class Relu(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return s.relu().square() / s.shape[-1]

    def true_weights(self, x: Tensor) -> Tensor:
        return self.true_scores(x).clamp(min=0) ** 2 / x.shape[1]


@zoo(THEME, "sparsemax by hand")
class Sparsemax(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        z = s.sort(-1, descending=True).values
        rank = torch.arange(1, s.shape[-1] + 1)
        total = z.cumsum(-1)
        support = (1 + rank * z > total).sum(-1, keepdim=True)
        return (s - (total.gather(-1, support - 1) - 1) / support).clamp(min=0)

    def true_weights(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        low, high = s.amin(-1, keepdim=True) - 1, s.amax(-1, keepdim=True)
        for _ in range(80):  # the threshold by bisection
            middle = (low + high) / 2
            much = (s - middle).clamp(min=0).sum(-1, keepdim=True) > 1
            low, high = torch.where(much, middle, low), torch.where(much, high, middle)
        return (s - low).clamp(min=0)


@zoo(THEME, "a learned temperature and cosine scores")
class Cosine(Attention):
    def build(self) -> None:
        self.logit_scale = nn.Parameter(torch.rand(self.heads, 1, 1) * 2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        a = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.exp()).softmax(-1)
        return self.o((a @ v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        q, k = self.part(self.q(x)), self.part(self.k(x))
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        return q @ k.mT * self.logit_scale.exp()


@zoo(THEME, "a norm of queries and keys")
class QueryKeyNorm(Attention):
    def build(self) -> None:
        self.q_norm, self.k_norm = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        with torch.no_grad():
            self.q_norm.weight.copy_(torch.rand(self.width) + 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        o = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.o(o.transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        parts = []
        for projected, norm in ((self.q(x), self.q_norm), (self.k(x), self.k_norm)):
            t = self.part(projected)
            t = (t - t.mean(-1, keepdim=True)) / (t.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
            parts.append(t * norm.weight + norm.bias)
        return parts[0] @ parts[1].mT * self.scale()


@zoo(THEME, "soft-capped scores (Gemma 2)")
class SoftCap(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return (2.0 * torch.tanh(s / 2.0)).softmax(-1)

    def true_weights(self, x: Tensor) -> Tensor:
        return softmax(2 * torch.tanh(self.true_scores(x) / 2))


@zoo(THEME, "two softmaxes, one of the other")
class TwoSoftmaxes(Changed):
    """Scores refined by a softmax of themselves (realformer-like residual of weights)."""

    def weigh(self, s: Tensor) -> Tensor:
        return (s + 3.0 * s.softmax(-1)).softmax(-1)

    def true_weights(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        return softmax(s + 3 * softmax(s))
