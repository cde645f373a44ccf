"""The lower and the upper half of a model's layers."""

from __future__ import annotations

from statistics import fmean

from manyheads.studies.result import Result
from manyheads.studies.study import Value


def lower_and_upper(result: Result, column: str, **key: Value) -> tuple[dict[int, float], dict[int, float]]:
    """The mean of a column over the layers of each half, by seed; a middle layer belongs to neither.

    >>> rows = [{"seed": 0, "layer": layer, "distance": layer} for layer in (1, 2, 3, 4, 5)]
    >>> lower_and_upper(Result("", "", {}, rows), "distance")
    ({0: 1.5}, {0: 4.5})
    """
    numbers = sorted({int(row["layer"] or 0) for row in result.where(**key)})
    half = len(numbers) // 2
    lower, upper = (
        [result.values(column, **key, layer=number) for number in part]
        for part in (numbers[:half], numbers[-half:])
    )
    return _mean(lower), _mean(upper)


def _mean(by_layer: list[dict[int, float]]) -> dict[int, float]:
    return {seed: fmean(each[seed] for each in by_layer) for seed in by_layer[0]}
