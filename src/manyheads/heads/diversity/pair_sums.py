"""Running sums for every pair of heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Pairs:
    """Named sums (heads, heads) in float64, which grow when new heads appear.

    >>> pairs = Pairs("count")
    >>> pairs.add("count", torch.tensor([0, 2]), torch.ones(2, 2))
    >>> pairs["count"]
    tensor([[1., 0., 1.],
            [0., 0., 0.],
            [1., 0., 1.]], dtype=torch.float64)
    """

    def __init__(self, *names: str) -> None:
        self._sums = {name: torch.zeros(0, 0, dtype=torch.float64) for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def add(self, name: str, heads: Tensor, values: Tensor) -> None:
        """Add values (heads, heads) for heads with these numbers."""
        self.reserve(1 + int(heads.max()))
        total = self._sums[name]
        total[heads[:, None], heads] += values.to(total)

    def reserve(self, heads: int) -> None:
        """Make room for this many heads."""
        for name, total in self._sums.items():
            if len(total) < heads:
                larger = total.new_zeros(heads, heads)
                larger[: len(total), : len(total)] = total
                self._sums[name] = larger

    def merge(self, others: Pairs) -> None:
        """Add the sums of the same heads over other batches."""
        self.reserve(max((len(total) for total in others._sums.values()), default=0))
        for name, total in others._sums.items():
            self._sums[name][: len(total), : len(total)] += total

    def where_always(self, count: str, values: Tensor) -> Tensor:
        """The values of pairs of heads that were counted together whenever one of them was, else NaN."""
        met = self._sums[count]
        alone = met.diagonal()
        return torch.where((met > 0) & (met == alone[:, None]) & (met == alone), values, math.nan)


def cosines(products: Tensor) -> Tensor:
    """Products (heads, heads) divided by the roots of each head's product with itself; NaN if that is zero.

    >>> cosines(torch.tensor([[4.0, 3.0], [3.0, 9.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    size = products.diagonal().clamp(min=0.0).sqrt()
    ratios = products / (size[:, None] * size)
    return torch.where(ratios.isfinite(), ratios.clamp(-1.0, 1.0), math.nan)
