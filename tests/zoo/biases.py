"""Biases of the scores, and what torch's own module adds to the keys."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Truth, View
from tests.zoo.masks import ahead
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "biases"


@zoo(THEME, "ALiBi")
class Alibi(Attention):
    kinds = ("causal",)

    def build(self) -> None:
        self.slopes = nn.Buffer(2.0 ** -(torch.arange(self.heads) + 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        i = torch.arange(x.shape[1])
        bias = -(i[:, None] - i).abs() * self.slopes[:, None, None]
        bias = bias.masked_fill(i > i[:, None], torch.finfo(bias.dtype).min)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return super().true_scores(x) - (i[:, None] - i).abs() * self.slopes[:, None, None]

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])


@zoo(THEME, "relative bias from buckets")
class RelativeBias(Attention):
    """T5: a table (buckets, heads), as many buckets as heads x width."""

    def build(self) -> None:
        self.table = nn.Embedding(24, self.heads)
        self.num_buckets = 24

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        i = torch.arange(x.shape[1])
        bucket = (i - i[:, None] + self.num_buckets // 2).clamp(0, self.num_buckets - 1)
        bias = self.table(bucket).permute(2, 0, 1).unsqueeze(0)
        return self.o(((q @ k.mT * self.scale() + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        bucket = (i - i[:, None] + 12).clamp(0, 23)
        return super().true_scores(x) + torch.stack(
            [self.table.weight[:, h][bucket] for h in range(self.heads)]
        )


@zoo(THEME, "scores moved by -7000")
class Moved(Attention):
    """Softmax cares about differences only; so low a score is not hidden."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        s = (q @ k.mT * self.scale()).double() - 7000.0
        return self.o((s.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))


@zoo(THEME, "a column moved by -7000 for some heads")
class MovedRows(Attention):
    """As a bias of one channel of queries and keys does."""

    def build(self) -> None:
        with torch.no_grad():
            self.q.weight[7] = 0.0
            self.q.bias[7] = 40.0
            self.k.weight[7] = 0.0
            self.k.bias[7] = -430.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(((q @ k.mT * self.scale()).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Torch(nn.Module):
    """nn.MultiheadAttention with its own options."""

    def __init__(self, kinds: tuple[str, ...] = ("self",), mask: str = "", **options: Any) -> None:
        super().__init__()
        self.kinds, self.mask = kinds, mask
        self.inside = nn.MultiheadAttention(20, 4, batch_first=True, **options)
        with torch.no_grad():
            self.inside.in_proj_weight.mul_(2.5)

    def forward(self, x: Tensor) -> Tensor:
        later = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.mask == "causal" else None
        )
        return self.inside(x, x, x, attn_mask=later, need_weights=self.mask == "weights")[0]

    def plain(self, x: Tensor, silent: Any) -> tuple[Tensor, list[Truth]]:
        m, (batch, length, _) = self.inside, x.shape
        q, k, v = (
            x @ w.T + b for w, b in zip(m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True)
        )
        if m.bias_k is not None:
            k, v = (
                torch.cat([t, bias.expand(batch, -1, -1)], 1) for t, bias in ((k, m.bias_k), (v, m.bias_v))
            )
        if m.add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(batch, 1, 20)], 1) for t in (k, v))
        weights, given = [], []
        for h in range(4):
            part = slice(5 * h, 5 * h + 5)
            s = q[..., part] @ k[..., part].mT / 5**0.5
            if self.mask == "causal":
                s = s.masked_fill(F.pad(ahead(length), (0, s.shape[-1] - length)), -torch.inf)
            weights.append(s.softmax(-1))
            given.append(weights[-1] @ v[..., part])
        w, outputs = torch.stack(weights, 1), torch.stack(given, 1)
        extra = w.shape[-1] > length
        truth = Truth("attn.inside", w, self.kinds, torch.arange(length), None, outputs, vague=extra)
        if extra:
            counted = torch.ones(batch, length, dtype=torch.bool)
            truth.views.append(View(w, torch.arange(length), counted, tokens=(0, length)))
        out = torch.cat([g * (h not in silent.get(0, ())) for h, g in enumerate(given)], -1)
        return m.out_proj(out), [truth]

    def example(self, batch: int, length: int) -> Tensor:
        return torch.randn(batch, length, 20)


add(THEME, "nn.MultiheadAttention", Torch)
add(THEME, "nn.MultiheadAttention, need_weights", lambda: Torch(mask="weights"))
add(
    THEME,
    "nn.MultiheadAttention, causal, add_bias_kv",
    lambda: Torch(("causal",), "causal", add_bias_kv=True),
)
add(THEME, "nn.MultiheadAttention, add_zero_attn", lambda: Torch(add_zero_attn=True))
add(
    THEME,
    "nn.MultiheadAttention, add_bias_kv, add_zero_attn",
    lambda: Torch(add_bias_kv=True, add_zero_attn=True),
)
add(THEME, "nn.MultiheadAttention, causal", lambda: Torch(("causal",), "causal"))
