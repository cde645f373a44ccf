"""Self-attention modules of others, and ours, behind one call: `build(name, d_model, heads)(x) -> output`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.inputs import timed

OURS = "manyheads"
BARE = "manyheads, no biases"


class Textbook(nn.Module):
    """Multi-head attention as in every tutorial: all weights are there, (batch, heads, length, length)."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.d_key = d_model // heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d_model = x.shape
        q, k, v = (
            project(x).view(batch, length, self.heads, self.d_key).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_key)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        heads = torch.matmul(weights, v)  # (batch, heads, length, d_key)
        return self.output(heads.transpose(1, 2).contiguous().view(batch, length, d_model))


class Torch(nn.Module):
    """torch's own module, self-attention, with or without the averaged weights."""

    def __init__(self, d_model: int, heads: int, dropout: float, weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, heads, dropout=dropout, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0]


def _x_transformers(d_model: int, heads: int, dropout: float, flash: bool) -> nn.Module:
    from x_transformers.x_transformers import Attention

    return Attention(d_model, dim_head=d_model // heads, heads=heads, dropout=dropout, flash=flash)


def _manyheads(d_model: int, heads: int, dropout: float, bias: bool = True) -> nn.Module:
    from manyheads.nn.multihead import MultiHeadAttention

    return MultiHeadAttention(d_model, heads, dropout=dropout, bias=bias)


CONTESTANTS: dict[str, Callable[[int, int, float], nn.Module]] = {
    OURS: _manyheads,
    BARE: lambda d_model, heads, dropout: _manyheads(d_model, heads, dropout, bias=False),
    "textbook": Textbook,
    "torch": lambda d_model, heads, dropout: Torch(d_model, heads, dropout, weights=False),
    "torch, weights": lambda d_model, heads, dropout: Torch(d_model, heads, dropout, weights=True),
    "x-transformers": lambda d_model, heads, dropout: _x_transformers(d_model, heads, dropout, flash=False),
    "x-transformers, flash": lambda d_model, heads, dropout: _x_transformers(
        d_model, heads, dropout, flash=True
    ),
}

# who holds (batch, heads, length, length) tensors: how many at its peak (measured), forward and with backward
MAPS = {"textbook": (3, 4), "torch": (1, 0), "torch, weights": (2, 4), "x-transformers": (4, 4)}

NOTE = (
    "Same d_model, heads and float32 input for all; biases everywhere except in x-transformers, which has no "
    "option for them. Forward is in eval mode without gradients, where "
    "torch's module takes its native path; forward+backward is in training mode, gradients of input and "
    "parameters."
)


def alike(peer: str) -> str:
    """Which of ours has the parameters of this peer."""
    return BARE if peer.startswith("x-transformers") else OURS


def build(name: str, d_model: int, heads: int, dropout: float = 0.0) -> nn.Module:
    """A module from (batch, length, d_model) to the same shape."""
    torch.manual_seed(0)
    return CONTESTANTS[name](d_model, heads, dropout)


def step(name: str, mode: str, d_model: int, heads: int, batch: int, length: int, dropout: float = 0.0):
    """One call of one contestant on (batch, length, d_model): evaluation when forward only, else training."""
    module = build(name, d_model, heads, dropout).train(mode != "forward")
    return timed(mode, module, [torch.randn(batch, length, d_model)], module.parameters())
