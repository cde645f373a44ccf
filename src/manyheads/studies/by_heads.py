"""What was measured by the number of heads: the parts of a study, and its figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.result import Result
from manyheads.studies.study import Language, Words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def numbers_of_heads(result: Result) -> Sequence[int]:
    """The numbers of heads of a result.

    >>> numbers_of_heads(Result("", "", {}, [{"heads": 2, "loss": 1.0}, {"heads": 1, "loss": 1.0}]))
    [2, 1]
    """
    return [int(heads) for heads in result.distinct("heads") if isinstance(heads, int)]


def draw_by_heads(result: Result, column: str, name: Words, language: Language) -> Figure:
    """A line with the column at every number of heads."""
    drawing, (axes,) = panels()
    heads = numbers_of_heads(result)
    line(axes, {number: result.interval(column, heads=number) for number in heads})
    log_ticks(axes, heads)
    axes.set_xlabel(Words("heads", "头数")[language])
    axes.set_ylabel(name[language])
    return drawing
