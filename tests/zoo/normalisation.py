"""How weights are made of scores, where it is not one softmax over the keys of each head."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.flows import merged
from tests.zoo.weights import Changed, softmax
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "normalisation"


@zoo(THEME, "softmin of distances")
class Softmin(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return F.softmin(-s, -1)


@zoo(THEME, "nn.Softmax of a score that is a negative distance (L2 attention)")
class Distances(Attention):
    sharp = 1.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged((-torch.cdist(q, k).square()).softmax(-1) @ v))

    def true_scores(self, x: Tensor) -> Tensor:
        q, k = self.part(self.q(x)), self.part(self.k(x))
        return -(q[:, :, :, None] - k[:, :, None]).square().sum(-1)


@zoo(THEME, "weights of one head sum to one with those of the others")
class JointSoftmax(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        b, h, n, _ = s.shape
        return s.transpose(1, 2).flatten(2).softmax(-1).view(b, n, h, n).transpose(1, 2)

    def true_weights(self, x: Tensor) -> Tensor:
        e = self.true_scores(x).exp()
        return e / e.sum((1, 3), keepdim=True)


@zoo(THEME, "softmax over the queries, then normalised over the keys (slots)")
class OverQueries(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-2)
        return a / a.sum(-1, keepdim=True)

    def true_weights(self, x: Tensor) -> Tensor:
        a = softmax(self.true_scores(x).mT).mT
        return a / a.sum(-1, keepdim=True)


@zoo(THEME, "the product of two softmaxes (LoFTR)")
class DualSoftmax(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return s.softmax(-1) * s.softmax(-2)

    def true_weights(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        return softmax(s) * softmax(s.mT).mT


@zoo(THEME, "hard attention, straight through")
class StraightThrough(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        hard = torch.zeros_like(a).scatter(-1, a.argmax(-1, keepdim=True), 1.0)
        return hard - a.detach() + a

    def true_weights(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        return (s == s.amax(-1, keepdim=True)).to(s.dtype)


@zoo(THEME, "a mixture of softmaxes", longer=None)
class MixtureOfSoftmaxes(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return 0.6 * s.softmax(-1) + 0.4 * (3 * s).softmax(-1)

    def true_weights(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        return 0.6 * softmax(s) + 0.4 * softmax(3 * s)


@zoo(THEME, "softmax in float64, weights cast back")
class Precise(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return s.double().softmax(-1).to(s.dtype)


@zoo(THEME, "sharpened: weights squared and renormalised")
class Sharpened(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1).square()
        return a / a.sum(-1, keepdim=True)

    def true_weights(self, x: Tensor) -> Tensor:
        return softmax(2 * self.true_scores(x))


@zoo(THEME, "weights accumulated from the layer before (RealFormer)")
class Residual(Attention):
    """One module, two attentions: scores of the first are added to those of the second."""

    def build(self) -> None:
        inner = self.heads * self.width
        self.q2, self.k2 = nn.Linear(self.d_model, inner), nn.Linear(self.d_model, inner)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        r, m = (f(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for f in (self.q2, self.k2))
        return self.o(merged((q @ k.mT * self.scale() + r @ m.mT).softmax(-1) @ v))

    def true_scores(self, x: Tensor) -> Tensor:
        return super().true_scores(x) + self.part(self.q2(x)) @ self.part(self.k2(x)).mT
