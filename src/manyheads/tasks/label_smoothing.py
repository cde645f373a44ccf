"""Cross-entropy with smoothed labels, in one walk over the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
# Logits are worked through in pieces of so many numbers, which stay in a core's cache from the first
# operation to the last; as one piece, each operation would read and write all of memory's share anew.
PIECE = 2**18


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum over tokens of -(1 - smoothing) log p(label) - smoothing mean(log p), as `F.cross_entropy`.

    Parameters
    ----------
    logits: (tokens, vocabulary).
    labels: (tokens,); `IGNORED` where there is none.
    smoothing: the share of probability that the target leaves to all tokens alike.

    Examples
    --------
    >>> logits, labels = torch.randn(5, 7, requires_grad=True), torch.tensor([3, 0, IGNORED, 6, 6])
    >>> wanted = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    >>> torch.allclose(cross_entropy(logits, labels, 0.1), wanted)
    True
    """
    if logits.device.type == "cpu" and torch.is_grad_enabled():
        summed: Tensor = _Smoothed.apply(logits, labels, smoothing)
        return summed
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")


class _Smoothed(torch.autograd.Function):
    """The gradient, softmax - target, is made along with the loss while the logits are at hand."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        tokens, vocabulary = logits.shape
        rows = max(PIECE // vocabulary, 1)
        gradient = torch.empty_like(logits)
        known = labels != IGNORED
        places = labels.clamp(min=0).unsqueeze(1)
        losses = torch.empty(tokens, dtype=logits.dtype)
        for start in range(0, tokens, rows):
            piece = slice(start, start + rows)
            x, p = logits[piece], gradient[piece]
            largest = x.amax(1, keepdim=True)
            torch.sub(x, largest, out=p).exp_()
            total = p.sum(1, keepdim=True)
            normaliser = (largest + total.log()).squeeze(1)  # log of the sum of all exponentials
            wanted = x.gather(1, places[piece]).squeeze(1)
            losses[piece] = normaliser - (1 - smoothing) * wanted - smoothing * x.mean(1)
            p.div_(total).sub_(smoothing / vocabulary)
            p.scatter_add_(1, places[piece], p.new_full((len(p), 1), smoothing - 1))
            p.mul_(known[piece].unsqueeze(1))
        ctx.gradient = gradient
        return losses.masked_fill_(~known, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("cross_entropy: its gradient was taken already; compute the loss again")
        return gradient.mul_(outer), None, None
