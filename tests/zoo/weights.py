"""What a model does to the weights after their softmax."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Truth
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "weights"


class Changed(Attention):
    """Subclasses say in `weigh` what becomes of the scores (batch, heads, queries, keys)."""

    length = 11

    def weigh(self, s: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o((self.weigh(q @ k.mT * self.scale()) @ v).transpose(1, 2).flatten(2))


def softmax(s: Tensor) -> Tensor:
    """The truth's own softmax."""
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@zoo(THEME, "masked after the softmax, renormalised")
class MaskedAfter(Changed):
    kinds = ("causal",)

    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1) * torch.ones(s.shape[-2:]).tril()
        return a / a.sum(-1, keepdim=True)

    def true_hidden(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


@zoo(THEME, "masked after the softmax, not renormalised")
class MaskedAfterLess(Changed):
    kinds = ("causal",)

    def weigh(self, s: Tensor) -> Tensor:
        return s.softmax(-1) * torch.ones(s.shape[-2:]).tril()

    def true_weights(self, x: Tensor) -> Tensor:
        return softmax(self.true_scores(x)).tril()


@zoo(THEME, "weights *= mask in place")
class MaskedInPlace(Changed):
    kinds = ("causal",)

    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        a *= torch.ones(s.shape[-2:]).tril()
        return a

    def true_weights(self, x: Tensor) -> Tensor:
        return softmax(self.true_scores(x)).tril()


@zoo(THEME, "top-k, not renormalised")
class TopK(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        return torch.where(a >= a.topk(2, -1).values[..., -1:], a, 0.0)

    def true_weights(self, x: Tensor) -> Tensor:
        a = softmax(self.true_scores(x))
        return a * (a.argsort(-1, descending=True).argsort(-1) < 2)


@zoo(THEME, "top-k of the scores, renormalised")
class TopKScores(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        best, where = s.topk(3, -1)
        return torch.full_like(s, -torch.inf).scatter(-1, where, best).softmax(-1)

    def true_hidden(self, x: Tensor) -> Tensor:
        return self.true_scores(x).argsort(-1, descending=True).argsort(-1) >= 3


@zoo(THEME, "mixed with a prior (ConViT)", longer=None)
class PriorMix(Changed):
    def build(self) -> None:
        self.prior = nn.Parameter(2 * torch.randn(self.heads, self.length, self.length))
        self.gating = nn.Parameter(torch.randn(self.heads))

    def weigh(self, s: Tensor) -> Tensor:
        gate = self.gating.view(1, -1, 1, 1).sigmoid()
        a = (1 - gate) * s.softmax(-1) + gate * self.prior.softmax(-1)
        return a / a.sum(-1).unsqueeze(-1)

    def true_weights(self, x: Tensor) -> Tensor:
        gate = 1 / (1 + (-self.gating).exp())[:, None, None]
        return gate * softmax(self.prior) + (1 - gate) * softmax(self.true_scores(x))


class TalkingHeads(Changed):
    """A linear map over the heads, of the scores before the softmax and/or of the weights after it."""

    def __init__(self, before: bool, after: bool) -> None:
        self.before, self.after = before, after
        super().__init__()

    def build(self) -> None:
        self.mix_l, self.mix_w = (
            nn.Linear(self.heads, self.heads, bias=False),
            nn.Linear(self.heads, self.heads, bias=False),
        )
        with torch.no_grad():
            for f in (self.mix_l, self.mix_w):
                f.weight.copy_(torch.eye(self.heads) + 0.4 * torch.rand(self.heads, self.heads))
            self.mix_w.weight.div_(self.mix_w.weight.sum(1, keepdim=True))

    def weigh(self, s: Tensor) -> Tensor:
        if self.before:
            s = self.mix_l(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        a = s.softmax(-1)
        return self.mix_w(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self.after else a

    def true_weights(self, x: Tensor) -> Tensor:
        s = self.true_scores(x)
        if self.before:
            s = torch.stack(
                [
                    sum(self.mix_l.weight[g, h] * s[:, h] for h in range(self.heads))
                    for g in range(self.heads)
                ],
                1,
            )
        a = softmax(s)
        if not self.after:
            return a
        return torch.stack(
            [sum(self.mix_w.weight[g, h] * a[:, h] for h in range(self.heads)) for g in range(self.heads)], 1
        )


add(THEME, "talking heads before the softmax", lambda: TalkingHeads(True, False))
add(THEME, "talking heads after the softmax", lambda: TalkingHeads(False, True))
add(THEME, "talking heads before and after (CaiT)", lambda: TalkingHeads(True, True))


@zoo(THEME, "differential")
class Differential(Attention):
    """Weights may be negative, and rows sum to a half."""

    vague = True

    def build(self) -> None:
        self.q2, self.k2 = (
            nn.Linear(self.d_model, self.heads * self.width),
            nn.Linear(self.d_model, self.heads * self.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, r, l = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v, self.q2, self.k2)
        )
        a = (q @ k.mT * self.scale()).softmax(-1) - 0.5 * (r @ l.mT * self.scale()).softmax(-1)
        return self.o((a @ v).transpose(1, 2).flatten(2))

    def true_weights(self, x: Tensor) -> Tensor:
        second = self.part(self.q2(x)) @ self.part(self.k2(x)).mT * self.scale()
        return softmax(self.true_scores(x)) - softmax(second) / 2


@zoo(THEME, "the memory of the scores is used again")
class ScoresReused(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        a = s.softmax(-1)
        s.zero_()
        return a


@zoo(THEME, "softmax(out=scores)")
class SoftmaxOut(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return torch.softmax(s, -1, out=s)


@zoo(THEME, "weights rounded to bfloat16")
class Rounded(Changed):
    def weigh(self, s: Tensor) -> Tensor:
        return s.softmax(-1, dtype=torch.float64).to(s.dtype)


@zoo(THEME, "weights times sqrt of the number of keys")
class TimesRoot(Changed):
    """Some add a factor so that outputs keep their size: rows sum to sqrt(keys)."""

    def weigh(self, s: Tensor) -> Tensor:
        return s.softmax(-1) * s.shape[-1] ** 0.5

    def true_weights(self, x: Tensor) -> Tensor:
        return softmax(self.true_scores(x)) * x.shape[1] ** 0.5


@zoo(THEME, "dropout of the weights, in training", train=True, longer=None)
class Dropped(Changed):
    """The weights are those before dropout; silenced heads are held against the same random numbers."""

    def build(self) -> None:
        self.drop = nn.Dropout(0.3)

    def weigh(self, s: Tensor) -> Tensor:
        return self.drop(s.softmax(-1))

    def plain(self, inputs, silent):  # type: ignore[no-untyped-def]
        x, truth = inputs, Truth("attn", self.true_weights(inputs), own=torch.arange(inputs.shape[1]))
        keep = self.drop(torch.ones(truth.weights.shape, dtype=torch.float32)).double()
        given = (truth.weights * keep) @ self.true_values(x)
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        return self.true_join(x, given), [truth]


@zoo(THEME, "fused with dropout, in training", train=True, longer=None, cut={0: frozenset({2})})
class FusedDropped(Attention):
    """What is dropped no plain code can say: the output is held against itself with zeroed columns."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        p = 0.3 if self.training else 0.0
        return self.o(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2))

    def plain(self, inputs, silent):  # type: ignore[no-untyped-def]
        truth = Truth("attn", self.true_weights(inputs), own=torch.arange(inputs.shape[1]))
        for h in silent.get(0, ()):
            self.o.weight.data[:, self.columns(h)] = 0.0
        return self.float()(inputs.float()).double(), [truth]
