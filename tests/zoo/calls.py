"""Keys of other sequences, caches, and several calls of one module."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Silent, Truth
from tests.zoo.masks import ahead
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "calls"


class Cross(Attention):
    """Queries of x, keys and values of another sequence, `more` longer."""

    kinds = ("cross",)

    def __init__(self, more: int = 4, fused: bool = True) -> None:
        self.more, self.fused = more, fused
        super().__init__()

    def example(self, batch: int, length: int) -> Any:
        return torch.randn(batch, length, self.d_model), torch.randn(batch, length + self.more, self.d_model)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(context).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        o = (
            F.scaled_dot_product_attention(q, k, v)
            if self.fused
            else (q @ k.mT * self.scale()).softmax(-1) @ v
        )
        return self.o(o.transpose(1, 2).flatten(2))

    def true_hidden(self, *_: Tensor) -> None:
        return None

    def true_scores(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return self.part(self.q(x)) @ self.part(self.k(context)).mT * self.scale()

    def true_weights(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return self.true_scores(x, context).softmax(-1)

    def true_values(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return self.part(self.v(context))


add(THEME, "cross, other length, fused", Cross)
add(THEME, "cross, other length, by hand", lambda: Cross(fused=False))
add(THEME, "cross, fewer keys, by hand", lambda: Cross(-4, fused=False))
add(THEME, "cross, same length", lambda: Cross(0))
add(THEME, "cross, same length, by hand, batch = heads", lambda: Cross(0, fused=False), size=(4, 11))
add(THEME, "cross, one query", lambda: Cross(6), size=(3, 1), longer=(2, 1))


@zoo(THEME, "class attention, one query of the sequence (CaiT)", longer=(2, 60))
class ClassAttention(Attention):
    """The query is token 0, the keys are all tokens: it stands at the first key, not at the last."""

    kinds = ("self", "cross")
    vague = True

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x[:, :1]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        return self.o((q * self.scale() @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        return super().true_scores(x)[:, :, :1]

    def true_own(self, weights: Tensor) -> Tensor:
        return torch.tensor([0])


@zoo(THEME, "learned queries over the tokens (perceiver)")
class Latents(Attention):
    kinds = ("cross",)

    def build(self) -> None:
        self.latents = nn.Parameter(torch.randn(5, self.d_model))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.latents).unflatten(-1, (self.heads, -1)).transpose(0, 1).expand(len(x), -1, -1, -1)
        k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        q = self.part(self.q(self.latents).expand(len(x), -1, -1))
        return q @ self.part(self.k(x)).mT * self.scale()


@zoo(THEME, "queries of every other token (pooled)")
class Pooled(Attention):
    """As in Funnel and MViT: fewer queries than keys, which stand between them."""

    kinds = ("self", "cross")
    vague = True

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x[:, ::2]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        return super().true_scores(x)[:, :, ::2]

    def true_own(self, weights: Tensor) -> Tensor:
        return torch.arange(0, weights.shape[3], 2)


@zoo(THEME, "projected keys (Linformer)", longer=None)
class Linformer(Attention):
    """Keys and values are five mixtures of all tokens: positions mean nothing."""

    kinds = ("self", "cross")
    vague = True

    def build(self) -> None:
        self.mix = nn.Parameter(torch.randn(5, 11) * 0.6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        k, v = self.mix @ k, self.mix @ v
        return self.o(((q @ k.mT * self.scale()).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        return self.part(self.q(x)) @ (self.mix @ self.part(self.k(x))).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.mix @ self.part(self.v(x))

    def true_own(self, weights: Tensor) -> None:
        return None


class Step(Attention):
    """One step of decoding: the keys of earlier steps come from a cache."""

    kinds = ("causal",)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o(o.transpose(1, 2).flatten(2))

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])


class Decoding(nn.Module):
    """A prompt of six tokens, then one token at a time: several calls of one module in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Step()

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        out = [self.inner(x[:, :6], cache)]
        out += [self.inner(x[:, i : i + 1], cache) for i in range(6, x.shape[1])]
        return torch.cat(out, 1)

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        whole = self.inner.plain(inputs, {})[1][0]
        given, parts = whole.outputs.clone(), []
        for i, (start, stop) in enumerate([(0, 6), *((n, n + 1) for n in range(6, inputs.shape[1]))]):
            hidden = None if i else ahead(6)
            p, o = whole.weights[:, :, start:stop, :stop], whole.outputs[:, :, start:stop]
            parts.append(
                Truth("attn.inner", p, ("causal", "self"), torch.arange(start, stop), None, o, hidden=hidden)
            )
            for h in silent.get(i, ()):
                given[:, h, start:stop] = 0.0
        return self.inner.true_join(inputs, given), parts

    def example(self, batch: int, length: int) -> Tensor:
        return self.inner.example(batch, length)


add(
    THEME,
    "decode: steps with a cache in one forward",
    Decoding,
    longer=None,
    cut={n: frozenset({1}) for n in range(6)},
)


class Generating(Step):
    """The same where each step is a forward of its own, as in `generate`: one site, every step counts."""

    def example(self, batch: int, length: int) -> Tensor:
        return torch.randn(batch, length, self.d_model)

    @staticmethod
    def drive(model: nn.Module, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        steps = [x[:, :6], *x[:, 6:].split(1, 1)]
        return torch.cat([model(part, cache) for part in steps], 1)


add(THEME, "decode: a forward for each step", Generating, longer=None, drive=Generating.drive)


class Twice(Attention):
    """One module called twice: on x, then on what it gave."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Twice()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.inner(x))

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        y, first = self.inner.plain(x, {0: silent.get(0, frozenset())})
        z, second = self.inner.plain(x + y, {0: silent.get(1, frozenset())})
        for truth in (*first, *second):
            truth.path = "attn.inner"
        return z, [*first, *second]

    def example(self, batch: int, length: int) -> Tensor:
        return self.inner.example(batch, length)


add(THEME, "a shared module called twice", Shared, cut={0: frozenset({1}), 1: frozenset({1})})


class TwoMasks(Attention):
    """The same queries and keys with two masks, both results added: two attentions of one module."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        super().__init__()

    def masks(self, length: int) -> tuple[Tensor, Tensor]:
        i = torch.arange(length)
        return i > i[:, None], (i[:, None] - i).abs() > 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        first, second = self.masks(x.shape[1])
        if self.fused:
            a, b = (F.scaled_dot_product_attention(q, k, v, attn_mask=~m) for m in (first, second))
        else:
            s = q @ k.mT * self.scale()
            a, b = (s.masked_fill(m, -torch.inf).softmax(-1) @ v for m in (first, second))
        return self.o((a + 2 * b).transpose(1, 2).flatten(2))

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        truths, total = [], 0.0
        for n, hidden in enumerate(self.masks(x.shape[1])):
            p = self.true_scores(x).masked_fill(hidden, -torch.inf).softmax(-1)
            given = p @ self.true_values(x)
            kinds = ("causal",) if n == 0 else ("self",)
            truths.append(
                Truth("attn", p, kinds, torch.arange(x.shape[1]), None, given.clone(), hidden=hidden)
            )
            for h in silent.get(n, ()):
                given[:, h] = 0.0
            total = total + (n + 1) * given
        return self.true_join(x, total), truths


BOTH = {0: frozenset({1}), 1: frozenset({1})}
add(THEME, "two masks on the same queries and keys, fused", lambda: TwoMasks(True), cut=BOTH)
add(THEME, "two masks on the same queries and keys, by hand", lambda: TwoMasks(False), cut=BOTH)
