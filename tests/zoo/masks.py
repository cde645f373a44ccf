"""Who may attend to whom: masks of all kinds, padding, biases, keys that are no tokens."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Truth
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

THEME = "masks"


def ahead(length: int, keys: int | None = None, step: int = 1) -> Tensor:
    """True where a key stands after its query."""
    keys = keys or length
    return torch.arange(keys) >= torch.arange(length)[:, None] + keys - length + step


class Biased(Attention):
    """Adds `bias(length)` to the scores and writes its own softmax, or hands it to the fused kernel."""

    kinds = ("causal",)

    def __init__(self, how: str, fused: bool) -> None:
        self.how, self.fused = how, fused
        super().__init__()

    def hide(self) -> float:
        lowest = torch.finfo(torch.float32).min
        return {"-1e4": -1e4, "-1e9": -1e9, "lowest": lowest, "-inf": -torch.inf}.get(self.how, -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mask = ~later if self.how == "bool" else torch.zeros(later.shape).masked_fill(later, self.hide())
        if self.fused:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            s = q @ k.mT * self.scale()
            o = (s.where(mask, -torch.inf) if self.how == "bool" else s + mask).softmax(-1) @ v
        return self.o(o.transpose(1, 2).flatten(2))

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1])


for how in ("bool", "-1e4", "-1e9", "lowest", "-inf"):
    add(THEME, f"causal by {how}, by hand", lambda how=how: Biased(how, False))
    add(THEME, f"causal by {how}, fused", lambda how=how: Biased(how, True))


class BiasObject(Attention):
    """A mask of torch.nn.attention.bias, which is a tensor without data."""

    kinds = ("causal",)

    def __init__(self, lower: bool) -> None:
        self.lower = lower
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        length, last = x.shape[1], 5 if self.lower else x.shape[1]
        bias = causal_lower_right(last, length) if self.lower else causal_upper_left(length, length)
        o = F.scaled_dot_product_attention(q[:, :, -last:], k, v, attn_mask=bias)
        return self.o(o.transpose(1, 2).flatten(2))

    def true_scores(self, x: Tensor) -> Tensor:
        scores = super().true_scores(x)
        return scores[:, :, -5:] if self.lower else scores

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(5 if self.lower else x.shape[1], x.shape[1])


add(THEME, "causal_upper_left as attn_mask", lambda: BiasObject(False))
add(THEME, "causal_lower_right as attn_mask", lambda: BiasObject(True))


class Hiding(Attention):
    """Subclasses say in `true_hidden` what is hidden; the forward hides it by -inf, or finite numbers."""

    low = -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        s = (q @ k.mT * self.scale()).masked_fill(self.true_hidden(x), self.low)
        return self.o((s.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2))


@zoo(THEME, "strictly causal, first query empty")
class StrictlyCausal(Hiding):
    kinds = ("causal",)

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1], step=0)


@zoo(THEME, "strictly causal by -1e9, first query even")
class StrictlyCausalFinite(Hiding):
    """The first query has no key left, so its scores are all alike and it looks everywhere."""

    kinds = ("causal", "self")
    low = -1e9

    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1], step=0)

    def true_weights(self, x: Tensor) -> Tensor:
        weights = super().true_weights(x)
        weights[:, :, 0] = 1 / x.shape[1]
        return weights

    def finish(self, truth: Truth) -> Truth:
        truth.hidden = truth.weights == 0
        return truth


@zoo(THEME, "prefix-LM")
class Prefix(Hiding):
    def true_hidden(self, x: Tensor) -> Tensor:
        return ahead(x.shape[1]) & (torch.arange(x.shape[1]) >= 4)


@zoo(THEME, "sliding window, causal")
class Sliding(Hiding):
    kinds = ("causal",)

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i > i[:, None]) | (i < i[:, None] - 3)


@zoo(THEME, "sliding window, both sides, fused")
class SlidingFused(Attention):
    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i[:, None] - i).abs() > 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        i = torch.arange(x.shape[1])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=(i[:, None] - i).abs() < 3)
        return self.o(o.transpose(1, 2).flatten(2))


@zoo(THEME, "a window of each head")
class HeadWindows(Hiding):
    """Per-head settings must follow their heads when some are cut."""

    def build(self) -> None:
        self.windows = nn.Buffer(torch.tensor([2, 3, 5, 60][: self.heads]))

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i[:, None] - i).abs() >= self.windows[:, None, None]


@zoo(THEME, "windows of heads as a list of numbers")
class HeadWindowList(Hiding):
    """The same where the settings are plain numbers, read head by head in a stack."""

    def build(self) -> None:
        self.windows = [2, 3, 5, 60]

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return torch.stack([(i[:, None] - i).abs() >= w for w in self.windows])


@zoo(THEME, "a limit that equals the number of heads x width", size=(3, 7))
class BlockSize(Hiding):
    """cut must leave the limit as it is, though it equals the inner width."""

    kinds = ("causal",)

    def build(self) -> None:
        self.block_size = self.heads * self.width
        self.n_head = self.heads

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i > i[:, None]) | (i[:, None] - i >= self.block_size)


@zoo(THEME, "a window that equals the number of heads", size=(3, 3))
class WindowOfHeads(Hiding):
    def build(self) -> None:
        self.window = 4

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i[:, None] - i).abs() >= self.window
