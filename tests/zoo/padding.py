"""Padding: which queries count; and keys that are no tokens (memories, sinks)."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Truth, View
from tests.zoo.masks import ahead
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "padding"


class Padded(Attention):
    """Takes (x, real) with real (batch, length) True for tokens.

    side: where the padding stands; low: what hides a key; rows: whether the mask hides all keys from queries
    that are padding, too.
    """

    def __init__(
        self, side: str, low: str = "bool", fused: bool = False, causal: bool = False, rows: bool = False
    ) -> None:
        self.side, self.low, self.fused, self.rows, self.causal = side, low, fused, rows, causal
        super().__init__()
        self.kinds = ("causal",) if causal else ("self",)

    def example(self, batch: int, length: int) -> Any:
        i, real = torch.arange(length), torch.ones(batch, length, dtype=torch.bool)
        for n in range(1, batch):
            if self.side in ("right", "both"):
                real[n] &= i < length - n - 1
            if self.side in ("left", "both"):
                real[n] &= i >= n
            if self.side == "holes":
                real[n] &= i % (n + 3) != 2
        return torch.randn(batch, length, self.d_model), real

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        shown = real[:, None, None, :]
        if self.rows:
            shown = shown & real[:, None, :, None]
        if self.causal:
            shown = shown & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.low == "bool":
            mask = shown
        else:
            number = {"-1e4": -1e4, "lowest": torch.finfo(torch.float32).min, "-inf": -torch.inf}[self.low]
            mask = torch.zeros(shown.shape).masked_fill(~shown, number)
        if self.fused:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            s = q @ k.mT * self.scale()
            s = s.masked_fill(~mask, -torch.inf) if self.low == "bool" else s + mask
            o = s.softmax(-1).nan_to_num(0.0) @ v
        return self.o(o.transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]
        return super().true_scores(x)

    def true_values(self, x: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]
        return super().true_values(x)

    def true_hidden(self, x: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]
        hidden = ~real[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        if self.causal:
            hidden = hidden | ahead(x.shape[1])
        if self.rows:
            hidden = hidden | ~real[:, None, :, None]
        return hidden

    def true_weights(self, x: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.true_hidden(x, real)
        scores = self.true_scores(x, real)
        nothing = hidden.all(-1, keepdim=True)
        e = (
            scores - scores.masked_fill(hidden & ~nothing, -torch.inf).amax(-1, keepdim=True)
        ).exp() * ~hidden
        if self.low in (
            "-1e4",
            "lowest",
        ):  # finite: a row without any key looks where it would, or everywhere
            level = torch.zeros_like(scores) if self.low == "lowest" else scores
            e = torch.where(nothing, (level - level.amax(-1, keepdim=True)).exp(), e)
        return e / e.sum(-1, keepdim=True).clamp(min=1e-300)

    def plain(self, inputs: Any, silent: Any) -> tuple[Tensor, list[Truth]]:
        x, real = inputs
        weights, values = self.true_weights(x, real), self.true_values(x, real)
        given = weights @ values
        own = torch.arange(x.shape[1])
        truth = Truth("attn", weights, self.kinds, own, real, given.clone(), hidden=self.true_hidden(x, real))
        if self.rows and self.low in ("-1e4", "lowest"):  # padding looks somewhere, as a readout token would
            truth.hidden = weights == 0
            truth.views.append(View(weights, own, torch.ones_like(real)))
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        return self.true_join(x, given), [truth]


for side in ("right", "left", "both", "holes"):
    add(THEME, f"padding {side}, bool, fused", lambda side=side: Padded(side, fused=True))
    add(THEME, f"padding {side}, -inf, by hand", lambda side=side: Padded(side, "-inf"))
add(THEME, "padding right, -1e4, by hand, batch = heads", lambda: Padded("right", "-1e4"), size=(4, 13))
add(THEME, "padding right, lowest, fused", lambda: Padded("right", "lowest", fused=True))
add(THEME, "padding right, causal", lambda: Padded("right", causal=True, fused=True))
add(THEME, "padding left, causal, empty rows, by hand", lambda: Padded("left", causal=True))
add(THEME, "padding left, causal, lowest, fused", lambda: Padded("left", "lowest", True, causal=True))
add(THEME, "padding both, rows hidden, too", lambda: Padded("both", rows=True))
add(THEME, "padding right, rows hidden, -1e4", lambda: Padded("right", "-1e4", rows=True))


class TorchPadded(nn.Module):
    """nn.TransformerEncoderLayer with src_key_padding_mask: its native fast path when not watched."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(20, 4, batch_first=True)
        with torch.no_grad():
            self.inside.in_proj_weight.mul_(2.5)

    def example(self, batch: int, length: int) -> Any:
        return torch.randn(batch, length, 20), torch.arange(length) >= length - torch.arange(batch)[:, None]

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.inside(x, x, x, key_padding_mask=padding)[0]

    def plain(self, inputs: Any, silent: Any) -> tuple[Tensor, list[Truth]]:
        x, padding = inputs
        m = self.inside
        q, k, v = (
            x @ w.T + b for w, b in zip(m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True)
        )
        q, k, v = (torch.stack(t.split(5, -1), 1) for t in (q, k, v))
        weights = (q @ k.mT / 5**0.5).masked_fill(padding[:, None, None], -torch.inf).softmax(-1)
        given = weights @ v
        truth = Truth("attn.inside", weights, ("self",), torch.arange(x.shape[1]), ~padding, given.clone())
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        return m.out_proj(torch.cat(given.unbind(1), -1)), [truth]


add(THEME, "nn.MultiheadAttention, key_padding_mask", TorchPadded)


class Memories(Attention):
    """Learned keys and values that every query may attend to, before or after the tokens."""

    vague = True

    def __init__(self, front: bool, causal: bool) -> None:
        self.front, self.causal = front, causal
        super().__init__()
        self.kinds = ("causal",) if causal else ("self",)

    def build(self) -> None:
        self.memory_k, self.memory_v = (
            nn.Parameter(torch.randn(2, self.heads, self.width)) for _ in range(2)
        )

    def joined(self, memory: Tensor, tokens: Tensor) -> Tensor:
        parts = [memory.transpose(0, 1).expand(len(tokens), -1, -1, -1), tokens]
        return torch.cat(parts if self.front else parts[::-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        k, v = self.joined(self.memory_k, k), self.joined(self.memory_v, v)
        s = q @ k.mT * self.scale()
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            s = s.masked_fill(F.pad(later, (2, 0) if self.front else (0, 2)), -torch.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        k = self.joined(self.memory_k, self.part(self.k(x)))
        return self.part(self.q(x)) @ k.mT * self.scale()

    def true_values(self, x: Tensor) -> Tensor:
        return self.joined(self.memory_v, self.part(self.v(x)))

    def true_hidden(self, x: Tensor) -> Tensor:
        hidden = ahead(x.shape[1]) & self.causal
        return F.pad(hidden, (2, 0) if self.front else (0, 2))

    def true_own(self, weights: Tensor) -> Tensor:
        return torch.arange(weights.shape[2]) + 2 * self.front

    def finish(self, truth: Truth) -> Truth:
        """Learned keys have no position among the tokens, or one that counts from the first of them."""
        length, start = truth.weights.shape[2], 2 * self.front
        counted = truth.all_views()[0].counted
        truth.views.append(View(truth.weights, torch.arange(length), counted, tokens=(start, start + length)))
        return truth


add(THEME, "memory keys in front", lambda: Memories(True, False))
add(THEME, "memory keys in front, causal", lambda: Memories(True, True))
add(THEME, "memory keys at the end", lambda: Memories(False, False))
add(THEME, "memory keys at the end, causal", lambda: Memories(False, True))


@zoo(THEME, "a learned sink of each head (GPT-OSS), causal")
class Sinks(Attention):
    kinds = ("causal",)
    vague = True

    def build(self) -> None:
        self.sinks = nn.Parameter(torch.randn(self.heads) + 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        s = (q @ k.mT * self.scale()).masked_fill(later, -torch.inf)
        s = torch.cat([s, self.sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
        a = s.softmax(-1)[..., :-1]
        return self.o((a @ v).transpose(1, 2).flatten(2))

    def true_weights(self, x: Tensor) -> Tensor:
        e = self.true_scores(x).exp().tril()
        return e / (e.sum(-1, keepdim=True) + self.sinks.exp()[:, None, None])

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])


@zoo(THEME, "a register token in front, thrown away", longer=(2, 90))
class Registers(Attention):
    """The sequence itself gets tokens in front; their outputs are dropped."""

    vague = True

    def build(self) -> None:
        self.registers = nn.Parameter(torch.randn(3, self.d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, 3:]

    def plain(self, inputs: Any, silent: Any) -> tuple[Tensor, list[Truth]]:
        x = torch.cat([self.registers.expand(len(inputs), -1, -1), inputs], 1)
        out, truths = super().plain(x, silent)
        whole = truths[0]
        used = whole.weights[:, :, 3:]
        counted = torch.ones(used.shape[0], used.shape[2], dtype=torch.bool)
        whole.views.append(View(used, torch.arange(3, x.shape[1]), counted))
        return out[:, 3:], truths
