"""Whole models with token ids, encoders with decoders, and odd constructions from papers."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import CASES, Attention, add, zoo
from tests.zoo.case import Case, Silent, Truth, View
from tests.zoo.masks import ahead
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "models"


class Foo(Attention):
    """Attention in a class whose name says nothing, with projections whose names say nothing."""

    kinds = ("causal",)

    def build(self) -> None:
        inner = self.heads * self.width
        self.thing, self.other = nn.Linear(self.d_model, 3 * inner), nn.Linear(inner, self.d_model)
        self.q = self.k = self.v = self.o = nn.Linear(1, 1)
        with torch.no_grad():
            self.thing.weight.mul_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.thing(x).view(*x.shape[:2], 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        d = F.scaled_dot_product_attention(a, b, c, is_causal="causal" in self.kinds)
        return self.other(d.transpose(1, 2).flatten(2))

    def third(self, x: Tensor, n: int) -> Tensor:
        return self.part(self.thing(x).chunk(3, -1)[n])

    def true_scores(self, x: Tensor) -> Tensor:
        return self.third(x, 0) @ self.third(x, 1).mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.third(x, 2)

    def true_hidden(self, x: Tensor) -> Tensor | None:
        return ahead(x.shape[1]) if "causal" in self.kinds else None

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return self.other(torch.cat(given.unbind(1), -1))


class TwoWay(Foo):
    kinds = ("self",)


class Language(nn.Module):
    """Token ids in, states out; the table of positions is larger than the vocabulary, or smaller.

    order: which of the two tables is looked up first.
    """

    def __init__(self, vocabulary: int, positions: int, layer: type[Foo], first: str = "tokens") -> None:
        super().__init__()
        self.first = first
        self.wte, self.wpe = nn.Embedding(vocabulary, 23), nn.Embedding(positions, 23)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def embed(self, ids: Tensor) -> Tensor:
        places = (
            torch.arange(ids.shape[1]).expand(ids.shape)
            if self.first == "places"
            else torch.arange(ids.shape[1])
        )
        if self.first == "places":
            return self.wpe(places) + self.wte(ids)
        return self.wte(ids) + self.wpe(places)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def plain(self, ids: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        x, truths = self.wte.weight[ids] + self.wpe.weight[: ids.shape[1]], []
        for n, layer in enumerate(self.layers):
            out, truth = layer.plain(x, {0: silent.get(n, frozenset())})
            truth[0].path, truth[0].ids = f"attn.layers.{n}", ids
            truths += truth
            x = x + out
        return x, truths

    def example(self, batch: int, length: int) -> Tensor:
        return torch.randint(self.wte.num_embeddings, (batch, length))


SPECIAL = {"special": [1, 3, 5]}
add(THEME, "a language model, words", lambda: Language(257, 101, Foo), tokens=SPECIAL)
add(
    THEME,
    "a language model, characters: more positions than tokens",
    lambda: Language(17, 101, Foo),
    tokens=SPECIAL,
)
add(
    THEME,
    "an encoder, proteins: positions first and more",
    lambda: Language(17, 101, TwoWay, "places"),
    tokens=SPECIAL,
)
add(
    THEME,
    "an encoder, as many positions as tokens",
    lambda: Language(97, 97, TwoWay, "places"),
    tokens=SPECIAL,
)


class Translator(nn.Module):
    """An encoder layer, a causal layer and cross-attention of the second to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer, self.bridge = TwoWay(), Foo(), Between()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = source + self.reader(source)
        x = target + self.writer(target)
        return x + self.bridge(x, memory)

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        source, target = inputs
        given = [{0: silent.get(n, frozenset())} for n in range(3)]
        out, a = self.reader.plain(source, given[0])
        memory = source + out
        out, b = self.writer.plain(target, given[1])
        x = target + out
        out, c = self.bridge.plain((x, memory), given[2])
        a[0].path, b[0].path, c[0].path = "attn.reader", "attn.writer", "attn.bridge"
        return x + out, [*a, *b, *c]

    def example(self, batch: int, length: int) -> Any:
        return torch.randn(batch, length, 23), torch.randn(batch, length, 23)


class Between(Attention):
    kinds = ("cross",)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, (k, v) = self.q(x), (self.k(memory), self.v(memory))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.o((q @ k.mT * self.scale()).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    def true_hidden(self, *_: Tensor) -> None:
        return None

    def true_weights(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return (self.part(self.q(x)) @ self.part(self.k(memory)).mT * self.scale()).softmax(-1)

    def true_values(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return self.part(self.v(memory))


add(THEME, "encoder and decoder, same lengths", Translator)


def _root() -> Case:
    """The model itself is the attention: its path is empty."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Foo()
        x, longer = torch.randn(3, 11, 23), torch.randn(2, 90, 23)

    def plain(net: Any, given: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        out, truths = net.plain(given, silent)
        truths[0].path = ""
        return out, truths

    return Case("attention is the whole model", THEME, model.eval(), x, plain, longer)


CASES["attention is the whole model"] = _root
add(THEME, "attention called Foo", Foo)
add(THEME, "attention called Foo, one sample", Foo, size=(1, 13))
add(THEME, "attention called Foo, as long as heads x width", Foo, size=(2, 24))


@zoo(THEME, "halves of the heads: local and global", longer=(2, 90))
class Halves(Attention):
    """Two calls in one module, each for half of the heads (Long-Short, SG-Former)."""

    scattered = True

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        near = (i - i[:, None]).abs() > 2
        return torch.stack([near, near, near & False, near & False])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        i = torch.arange(x.shape[1])
        near = (i - i[:, None]).abs() <= 2
        a = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2], attn_mask=near)
        b = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:])
        return self.o(torch.cat([a, b], 1).transpose(1, 2).flatten(2))


@zoo(THEME, "landmarks and iterations (Nystromformer)", size=(3, 12), longer=None)
class Nystrom(Attention):
    """The softmax of landmarks over tokens multiplies the values; the other softmaxes are no sites."""

    kinds = ("self", "cross")
    vague = True

    def landmarks(self, t: Tensor) -> Tensor:
        return t.unflatten(2, (4, -1)).mean(3)

    def inverse(self, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype)
        z = a.mT / a.sum(-2, keepdim=True).amax(-1, keepdim=True)
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        return z

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        ql, kl = self.landmarks(q), self.landmarks(k)
        first = (q @ kl.mT * self.scale()).softmax(-1)
        middle = (ql @ kl.mT * self.scale()).softmax(-1)
        last = (ql @ k.mT * self.scale()).softmax(-1)
        return self.o((first @ self.inverse(middle) @ (last @ v)).transpose(1, 2).flatten(2))

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        q, k, v = (self.part(f(x)) for f in (self.q, self.k, self.v))
        ql, kl = self.landmarks(q), self.landmarks(k)
        weights = (ql @ k.mT * self.scale()).softmax(-1)
        given = weights @ v
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        spread = (q @ kl.mT * self.scale()).softmax(-1) @ self.inverse(
            (ql @ kl.mT * self.scale()).softmax(-1)
        )
        return self.true_join(x, spread @ given), [Truth("attn", weights, self.kinds, None, vague=True)]


@zoo(THEME, "a memory of keys for each query (memorizing)", longer=None)
class Memorizing(Attention):
    """Each query has three keys of its own from a memory, and the local ones; one softmax over both."""

    kinds = ("causal", "self", "cross")
    vague = True

    def build(self) -> None:
        self.stored_k, self.stored_v = (nn.Buffer(torch.randn(19, self.heads * self.width)) for _ in range(2))

    def looked_up(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, heads, queries, 3, width) of the nearest stored keys, by the products."""
        k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1) for t in (self.stored_k, self.stored_v))
        index = (q @ k.mT).topk(3, -1).indices
        heads = torch.arange(self.heads)[:, None, None]
        return k[heads, index], v[heads, index]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        mk, mv = self.looked_up(q)
        far = torch.einsum("bhid,bhijd->bhij", q, mk) * self.scale()
        near = (q @ k.mT * self.scale()).masked_fill(ahead(x.shape[1]), -torch.inf)
        a = torch.cat([far, near], -1).softmax(-1)
        o = torch.einsum("bhij,bhijd->bhid", a[..., :3], mv) + a[..., 3:] @ v
        return self.o(o.transpose(1, 2).flatten(2))

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        q, k, v = (self.part(f(x)) for f in (self.q, self.k, self.v))
        mk, mv = self.looked_up(q)
        far = (q.unsqueeze(3) * mk).sum(-1) * self.scale()
        near = (q @ k.mT * self.scale()).masked_fill(ahead(x.shape[1]), -torch.inf)
        weights = torch.cat([far, near], -1).softmax(-1)
        given = weights[..., 3:] @ v + (weights[..., :3].unsqueeze(-1) * mv).sum(3)
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        own, counted = torch.arange(x.shape[1]), torch.ones(x.shape[:2], dtype=torch.bool)
        truth = Truth("attn", weights, self.kinds, own + 3, vague=True)
        truth.views.append(View(weights, own, counted, tokens=(3, 3 + x.shape[1])))
        return self.true_join(x, given), [truth]
