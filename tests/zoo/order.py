"""In which order tokens and samples attend, what a module keeps, and what has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.case import Silent, Truth
from tests.zoo.flows import merged
from tests.zoo.masks import ahead
from torch import Tensor
from torch.nn import functional as F

THEME = "order"


@zoo(THEME, "queries and keys behind a detach")
class Detached(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention(q.detach(), k.detach(), v)))


@zoo(THEME, "scores without a gradient")
class UnderNoGrad(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        with torch.no_grad():
            a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o(merged(a @ v))


@zoo(THEME, "a mask that the first forward keeps", longer=(2, 11))
class KeptMask(Attention):
    kinds = ("causal",)

    def build(self) -> None:
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = ~ahead(x.shape[1])
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        n = x.shape[1]
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:n, :n])))

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])


@zoo(THEME, "queries rounded to whole numbers (quantised, no gradient)")
class Rounded(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(merged(F.scaled_dot_product_attention((q * 4).round() / 4, k, v)))

    def true_scores(self, x: Tensor) -> Tensor:
        return (
            (self.part(self.q(x).float()).mul(4).round() / 4).double()
            @ self.part(self.k(x)).mT
            * self.scale()
        )


@zoo(THEME, "half of the tokens read by content: a sort before attention")
class Sorted(Attention):
    """Tokens are sorted by their first channel, attend in that order, and are put back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[..., 0].argsort(1)
        back = order.argsort(1)[..., None]
        y = x.gather(1, order[..., None].expand_as(x))
        q, k, v = (t.transpose(1, 2) for t in self.split(y))
        o = self.o(merged(F.scaled_dot_product_attention(q, k, v)))
        return o.gather(1, back.expand_as(o))

    vague = True

    def true_own(self, weights: Tensor) -> Tensor | None:
        return None


@zoo(THEME, "from right to left")
class Flipped(Attention):
    kinds = ("causal", "self")
    vague = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x.flip(1)))
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))).flip(1)

    def true_weights(self, x: Tensor) -> Tensor:
        return super().true_weights(x.flip(1))

    def true_values(self, x: Tensor) -> Tensor:
        return self.part(self.v(x.flip(1)))

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return super().true_join(x, given).flip(1)


@zoo(THEME, "samples attend to each other (SAINT)", longer=None)
class BetweenSamples(Attention):
    """Each token position attends over the samples of the batch: positions are those of samples."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in self.split(x))  # (length, heads, batch, width)
        return self.o(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        y = inputs.transpose(0, 1)
        weights = self.true_weights(y)
        given = weights @ self.part(self.v(y))
        for h in silent.get(0, ()):
            given[:, h] = 0
        truth = Truth("attn", weights, ("self",), torch.arange(len(inputs)))
        return self.true_join(y, given).transpose(0, 1), [truth]
