"""Modules that mix tokens without attention of queries to keys: no site, and named in `missed`."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import CASES, Attention, Net
from tests.zoo.case import Case
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "mixers"
LENGTH, D_MODEL = 11, 23


def mixer(name: str) -> Any:
    """A class decorator: this module mixes tokens, and there is no attention in it."""

    def put(module: type) -> type:
        def case() -> Case:
            with torch.random.fork_rng():
                torch.manual_seed(sum(map(ord, name)))
                model = Net(module()).eval()
                x = torch.randn(3, LENGTH, D_MODEL)
            return Case(name, THEME, model, x, lambda net, given, silent: (net(given), []), mixer="attn")

        CASES[name] = case
        return module

    return put


@mixer("MLP over tokens (MLP-Mixer)")
class TokenMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(LENGTH, 29), nn.Linear(29, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.mT))).mT


@mixer("depthwise convolution")
class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D_MODEL, D_MODEL, 3, padding=1, groups=D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


@mixer("GRU")
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


@mixer("Fourier transform (FNet)")
class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x.float()).real


@mixer("a scan (state space)")
class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay, self.into, self.out = (
            nn.Parameter(torch.rand(D_MODEL)),
            nn.Linear(D_MODEL, D_MODEL),
            nn.Linear(D_MODEL, D_MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        state, steps = torch.zeros_like(x[:, 0]), []
        for step in self.into(x).unbind(1):
            state = state * self.decay + step
            steps.append(state)
        return self.out(torch.stack(steps, 1))


@mixer("cumulative mean")
class Cumulative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@mixer("average pooling over all tokens")
class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@mixer("shifted tokens (RWKV, S2-MLP)")
class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :11], F.pad(x, (0, 0, 1, -1))[..., 11:]], -1)


@mixer("softmax of a parameter over tokens (static weights)")
class StaticWeights(nn.Module):
    """Synthesizer's random attention: weights without queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scores.softmax(-1) @ x


class Linear(Attention):
    """Subclasses map queries and keys to features first; the sum over keys is taken before the queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


@mixer("linear attention, softmax over channels and tokens (Efficient Attention)")
class LinearSoftmax(Linear):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@mixer("linear attention, softmax over channels, length = width")
class LinearSquare(LinearSoftmax):
    width = LENGTH


@mixer("linear attention, elu + 1")
class LinearElu(Linear):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(2).unsqueeze(-1))


@mixer("cross-covariance attention (XCiT)")
class CrossCovariance(Linear):
    """Weights between channels, not tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=2), F.normalize(k, dim=2)
        return v @ (q.mT @ k).softmax(-1).mT


@mixer("cross-covariance attention, width = length")
class CrossCovarianceSquare(CrossCovariance):
    width = LENGTH


@mixer("channel attention (squeeze and excite)")
class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(D_MODEL, 7), nn.Linear(7, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean(1)).relu()).softmax(-1).unsqueeze(1)


@mixer("a gate of a convolution over tokens (gMLP)")
class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = (
            nn.Conv1d(LENGTH, LENGTH, 1),
            nn.Linear(D_MODEL, 26),
            nn.Linear(13, D_MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.up(x).chunk(2, -1)
        return self.down(u * self.mix(v))


@mixer("mixture of experts' router over tokens (expert choice)")
class ExpertChoice(nn.Module):
    """A softmax over tokens for each expert: weights, but no queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(D_MODEL, 5), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        dispatch = self.router(x).softmax(1)  # (batch, tokens, experts): soft mixture of experts
        return self.router(x).softmax(-1) @ self.expert(dispatch.mT @ x)
