"""Means with confidence intervals, over seeds or other repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval, from ``count`` repetitions; NaN where there is only one."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        """``f"{interval:.1f}"`` is "1.9 ± 0.4"; only the mean where there is one repetition.

        >>> f"{interval([1.0, 2.0, 3.0]):.1f}", f"{interval([2.0]):.1f}"
        ('2.0 ± 2.5', '2.0')
        """
        mean = format(self.mean, spec)
        return f"{mean} ± {format(self.half, spec)}" if math.isfinite(self.half) else mean


def interval(values: Iterable[float], level: float = 0.95) -> Interval:
    """The mean of independent repetitions with Student's confidence interval.

    >>> seeds = interval([1.0, 2.0, 3.0])
    >>> seeds.mean, round(seeds.low, 3), round(seeds.high, 3), seeds.count
    (2.0, -0.484, 4.484, 3)
    """
    numbers = np.fromiter(values, float)
    if not len(numbers):
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(numbers.mean())
    if len(numbers) == 1:
        return Interval(mean, math.nan, math.nan, 1)
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    half = float(stats.t.ppf((1 + level) / 2, len(numbers) - 1)) * error
    return Interval(mean, mean - half, mean + half, len(numbers))


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float], level: float = 0.95
) -> Interval:
    """The interval of first minus second, over the seeds that both have: what seeds share cancels out.

    >>> paired_difference({0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0, 2: 9.0}).mean
    2.0
    """
    return interval((first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())), level)
