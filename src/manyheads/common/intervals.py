"""Means, shares and other statistics with confidence intervals, over seeds, examples or other repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    half = student(len(numbers) - 1, level) * error
    return Interval(mean, mean - half, mean + half, len(numbers))


def student(degrees: int, level: float = 0.95) -> float:
    """How many standard errors an interval reaches to each side: a quantile of Student's t.

    >>> [round(student(n), 2) for n in (2, 10, 1000)]
    [4.3, 2.23, 1.96]
    """
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(degrees, (1 + level) / 2)) if degrees > 0 else math.nan


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float], level: float = 0.95
) -> Interval:
    """The interval of first minus second, over the seeds that both have: what seeds share cancels out.

    >>> paired_difference({0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0, 2: 9.0}).mean
    2.0
    """
    return interval((first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())), level)


def binomial(right: int, count: int, level: float = 0.95) -> Interval:
    """The share ``right`` of ``count`` with Wilson's confidence interval, which stays within 0 and 1.

    >>> share = binomial(8, 10)
    >>> share.mean, round(share.low, 3), round(share.high, 3)
    (0.8, 0.49, 0.943)
    """
    if not count:
        return Interval(math.nan, math.nan, math.nan, 0)
    from scipy import stats

    ends = stats.binomtest(right, count).proportion_ci(level, method="wilson")
    return Interval(right / count, float(ends.low), float(ends.high), count)


def bootstrap(
    value: Callable[[NDArray[np.intp]], float],
    count: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """A statistic of some examples, with the percentile interval over examples drawn again (Efron 1979).

    Parameters
    ----------
    value: the statistic, from the indices of examples.
    count: how many examples there are.
    resamples, seed: how often they are drawn, and the seed of that.

    >>> numbers = np.array([1.0, 2.0, 3.0, 4.0])
    >>> mean = bootstrap(lambda i: numbers[i].mean(), 4)
    >>> mean.mean, mean.low < 2.5 < mean.high
    (2.5, True)
    """
    point = float(value(np.arange(count)))
    if count < 2:
        return Interval(point, math.nan, math.nan, count)
    generator = np.random.default_rng(seed)
    values = np.array([value(generator.integers(count, size=count)) for _ in range(resamples)])
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(point, math.nan, math.nan, count)
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return Interval(point, float(low), float(high), count)
