"""Running sums of per-query numbers, one set for each head of a site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Tally:
    """Counts, sums and sums of squares of several metrics, in float64, for each head.

    >>> tally = Tally(["entropy"], heads=2)
    >>> tally.add({"entropy": torch.ones(1, 2, 3)}, torch.ones(1, 2, 3, dtype=torch.bool))
    >>> tally.sums["entropy"].tolist()  # count, sum and sum of squares of each head
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """

    def __init__(
        self, names: Sequence[str], heads: int, device: torch.device | str = "cpu", profiles: bool = False
    ) -> None:
        self.names = list(names)
        self.heads = heads
        self.tokens = torch.zeros(heads, dtype=torch.float64, device=device)
        self._sums = torch.zeros(3, len(self.names), heads, dtype=torch.float64, device=device)
        self.profiles: dict[str, Tensor] | None = {} if profiles else None

    @property
    def sums(self) -> dict[str, Tensor]:
        """For each metric its count, sum and sum of squares (3, heads)."""
        return {name: self._sums[:, i].cpu() for i, name in enumerate(self.names)}

    def add(
        self,
        values: dict[str, Tensor],
        counted: Tensor,
        fewer: dict[str, Tensor] | None = None,
        start: int = 0,
    ) -> None:
        """Add values (batch, heads, queries) where ``counted`` (the same shape); ``fewer`` narrows it for a
        metric.

        ``start`` is the position of query 0, for the profiles. Metrics that are not among the values are
        left alone.
        """
        place = [i for i, name in enumerate(self.names) if name in values]
        names = [self.names[i] for i in place]
        x = torch.stack([values[name] for name in names]).to(
            torch.float64
        )  # (metrics, batch, heads, queries)
        where = counted.expand(x.shape[1:])
        masks = [where & fewer[name] if fewer and name in fewer else where for name in names]
        weight = torch.stack(masks) if fewer else where.expand(x.shape)
        x = torch.where(weight, x, 0.0)
        index = torch.tensor(place, device=x.device)
        self.tokens += where.sum((0, 2))
        for row, part in enumerate((weight, x, x * x)):
            self._sums[row].index_add_(0, index, part.sum((1, 3)).to(torch.float64))
            if self.profiles is not None and row < 2:
                summed = part.sum(1).to(torch.float64)  # (metrics, heads, queries)
                for name, profile in zip(names, summed, strict=True):
                    self._lengthen(name, row, profile, start)

    def received(self, weights: Tensor, real: Tensor) -> None:
        """Add the attention that keys got: (batch, heads, keys), where ``real`` (batch, keys)."""
        if self.profiles is not None:
            there = real.unsqueeze(1).expand(weights.shape)
            self._lengthen("received", 0, there.sum(0), 0)
            self._lengthen("received", 1, torch.where(there, weights, 0.0).to(torch.float64).sum(0), 0)

    def _lengthen(self, name: str, row: int, values: Tensor, start: int) -> None:
        """Add (heads, length) to a profile (2, heads, positions), making it longer when needed."""
        assert self.profiles is not None
        profile = self.profiles.get(name)
        end = start + values.shape[-1]
        if profile is None or profile.shape[-1] < end:
            longer = torch.zeros(2, self.heads, end, dtype=torch.float64, device=values.device)
            if profile is not None:
                longer[..., : profile.shape[-1]] = profile
            profile = self.profiles[name] = longer
        profile[row, :, start:end] += values
