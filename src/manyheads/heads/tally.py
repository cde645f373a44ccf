"""Running sums of per-query numbers, one set for each head of a site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.common.devices import for_float64, in_float64


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
        device = for_float64(torch.device(device))
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
        """Add values (batch, heads, queries) where ``counted`` (a shape that broadcasts to theirs).

        ``fewer`` counts fewer queries for a metric, whose values must be zero at the others. ``start`` is the
        position of query 0, for the profiles. Metrics that are not among the values are left alone.
        """
        names = [name for name in self.names if name in values]
        # (metrics, batch, heads, queries)
        x = in_float64(torch.stack([values[name] for name in names]))
        counted = counted.to(x.device)
        if not bool(counted.all()):
            x.masked_fill_(~counted, 0.0)
        weights = {name: counted & narrower.to(x.device) for name, narrower in (fewer or {}).items()}
        tokens = counted.expand(x.shape[1:]).sum((0, 2))
        self.tokens += tokens
        counts = tokens.to(torch.float64).repeat(len(names), 1)
        for name, weight in weights.items():
            counts[names.index(name)] = weight.expand(x.shape[1:]).sum((0, 2))
        if self.profiles is not None:
            for name, profile in zip(names, x.sum(1), strict=True):
                self._lengthen(name, 0, weights.get(name, counted).expand(x.shape[1:]).sum(0), start)
                self._lengthen(name, 1, profile, start)
        sums = torch.stack((counts, x.sum((1, 3)), x.square_().sum((1, 3))))
        if len(names) == len(self.names):
            self._sums += sums
        else:
            self._sums[:, [self.names.index(name) for name in names]] += sums

    def received(self, weights: Tensor, real: Tensor) -> None:
        """Add the attention that keys got: (batch, heads, keys), where ``real`` (batch, keys)."""
        if self.profiles is not None:
            weights = in_float64(weights)
            there = real.to(weights.device).unsqueeze(1).expand(weights.shape)
            self._lengthen("received", 0, there.sum(0), 0)
            self._lengthen("received", 1, torch.where(there, weights, 0.0).sum(0), 0)

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
