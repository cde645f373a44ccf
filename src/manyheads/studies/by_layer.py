"""What was measured by layer: the lower and the upper half of a model, and the lines of a figure."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from manyheads.studies.drawing import line
from manyheads.studies.result import Result
from manyheads.studies.study import Language, Value, Words
from manyheads.studies.subjects import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def draw_by_layer(axes: Axes, result: Result, column: str, language: Language) -> None:
    """A line for every model in which the column was measured."""
    for number, name in enumerate(result.distinct("model")):
        layers = [int(row["layer"] or 0) for row in result.where(model=name, seed=0)]
        points = {layer: result.interval(column, model=name, layer=layer) for layer in layers}
        if all(point.count for point in points.values()):
            line(axes, points, NAMES[str(name)][language], number)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xticks(sorted({int(row["layer"] or 0) for row in result.rows}))
    axes.set_xlabel(Words("layer", "层")[language])


def _mean(by_layer: list[dict[int, float]]) -> dict[int, float]:
    return {seed: fmean(each[seed] for each in by_layer) for seed in by_layer[0]}
