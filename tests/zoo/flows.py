"""What goes into and comes out of the heads besides: norms, gates, convolutions, other values."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, zoo
from tests.zoo.case import Silent, Truth
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "flows"


class Joined(Attention):
    """Subclasses say in `join` what becomes of the heads' outputs (batch, heads, length, width)."""

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.join(x, v, F.scaled_dot_product_attention(q, k, v))


def merged(o: Tensor) -> Tensor:
    return o.transpose(1, 2).flatten(2)


@zoo(THEME, "a convolution of the values beside (LePE, CSWin)")
class LePE(Joined):
    """What the convolution gives stays when a head is silent: it is not what attention gives."""

    def build(self) -> None:
        inner = self.heads * self.width
        self.lepe = nn.Conv1d(inner, inner, 3, padding=1, groups=inner)

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(merged(o) + self.lepe(merged(v).mT).mT)

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        v, w = F.pad(self.v(x), (0, 0, 1, 1)), self.lepe.weight[:, 0]
        beside = sum(v[:, n : n + x.shape[1]] * w[:, n] for n in range(3)) + self.lepe.bias
        return self.o(torch.cat(given.unbind(1), -1) + beside)


@zoo(THEME, "a norm over all heads before the projection (BEiT-3)")
class SubNorm(Joined):
    def build(self) -> None:
        self.norm = nn.LayerNorm(self.heads * self.width)

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(self.norm(merged(o)))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        whole = torch.cat(given.unbind(1), -1)
        centred = whole - whole.mean(-1, keepdim=True)
        return self.o(centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt())


@zoo(THEME, "a norm of each head before the projection (differential's)")
class HeadNorm(Joined):
    """Of zeros, the norm's bias remains."""

    def build(self) -> None:
        self.norm = nn.LayerNorm(self.width)
        with torch.no_grad():
            self.norm.bias.normal_()

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(merged(self.norm(o)))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        centred = given - given.mean(-1, keepdim=True)
        out = centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt() + self.norm.bias
        return self.o(torch.cat(out.unbind(1), -1))


@zoo(THEME, "a gate of each head after attention")
class HeadGates(Joined):
    def build(self) -> None:
        self.gate = nn.Linear(self.d_model, self.heads)

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(merged(o * self.gate(x).sigmoid().mT.unsqueeze(-1)))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        gates = 1 / (1 + (-self.gate(x)).exp())
        return self.o(torch.cat([given[:, h] * gates[..., h : h + 1] for h in range(self.heads)], -1))


@zoo(THEME, "a gate of each channel after attention (Qwen3-Next)")
class ChannelGates(Joined):
    def build(self) -> None:
        self.gate = nn.Linear(self.d_model, self.heads * self.width)

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(merged(o) * F.silu(self.gate(x)))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.o(torch.cat(given.unbind(1), -1) * gate / (1 + (-gate).exp()))


@zoo(THEME, "a residual inside the module")
class Residual(Joined):
    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return x + 0.5 * self.o(merged(o))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return x + self.o(torch.cat(given.unbind(1), -1)) / 2


@zoo(THEME, "values added to what attention gives")
class ValueResidual(Joined):
    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(merged(o + v))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return self.o(torch.cat(given.unbind(1), -1) + self.v(x))


@zoo(THEME, "no output projection: heads are the output")
class NoProjection(Attention):
    d_model = 24

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return x + merged(F.scaled_dot_product_attention(q, k, v))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return x + torch.cat(given.unbind(1), -1)


@zoo(THEME, "heads are averaged (GAT)")
class Averaged(Attention):
    def build(self) -> None:
        self.o = nn.Linear(self.width, self.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(((q @ k.mT * self.scale()).softmax(-1) @ v).mean(1))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        return self.o(sum(given.unbind(1)) / self.heads)


@zoo(THEME, "an MLP over the concatenated heads")
class MlpAfter(Joined):
    def build(self) -> None:
        inner = self.heads * self.width
        self.o = nn.Sequential(nn.Linear(inner, 31), nn.GELU(), nn.Linear(31, self.d_model))  # type: ignore[assignment]

    def join(self, x: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return self.o(merged(o))


@zoo(THEME, "an image in, an image out, 1x1 convolutions", size=(3, 12), longer=None)
class ImageInOut(Attention):
    """(batch, channels, 3, 4) as in U-Nets."""

    def example(self, batch: int, length: int) -> Any:
        return torch.randn(batch, self.d_model, 3, length // 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        q, k, v = (t.transpose(1, 2) for t in self.split(tokens))
        out = self.o(merged(F.scaled_dot_product_attention(q, k, v)))
        return x + out.mT.unflatten(2, x.shape[2:])

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        out, truths = super().plain(inputs.flatten(2).mT, silent)
        truths[0].vague = True
        return inputs + out.mT.reshape(inputs.shape), truths
