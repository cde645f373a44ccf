"""Figures of studies: the same look for all, and text that any browser can show in any language."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5fa8", "#b8560f", "#2a7f4f", "#8a3f8f", "#a8323e", "#6b6b6b")
GREY = "#777777"
# Fonts with Chinese, where the machine has one.
FONTS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "PingFang SC",
    "Microsoft YaHei", "SimHei",
)  # fmt: skip


def panels(count: int = 1, width: float = 6.4, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure with some axes beside each other.

    >>> figure, (left, right) = panels(2)
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width if count == 1 else 4.6 * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, count, number + 1) for number in range(count)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25)
    return figure, axes


def line(
    axes: Axes,
    points: Mapping[int, Interval] | Mapping[float, Interval],
    label: str | None = None,
    number: int = 0,
    style: str = "o-",
) -> None:
    """A line with its interval, in the colour of this number."""
    x = list(points)
    errors = [each.half if math.isfinite(each.half) else 0.0 for each in points.values()]
    colour = COLOURS[number % len(COLOURS)]
    means = [each.mean for each in points.values()]
    axes.errorbar(
        x, means, yerr=errors, fmt=style, color=colour, label=label, markersize=4, linewidth=1.6,
        elinewidth=0.9, capsize=2,
    )  # fmt: skip


def bars(axes: Axes, values: Mapping[str, Interval], colours: Sequence[str] = ()) -> None:
    """A bar with its interval for every name."""
    names = list(values)
    axes.bar(
        range(len(names)),
        [values[name].mean for name in names],
        yerr=[values[name].half if math.isfinite(values[name].half) else 0.0 for name in names],
        color=list(colours) or COLOURS[0],
        width=0.62,
        error_kw={"elinewidth": 0.9, "capsize": 2},
    )
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")


def grouped_bars(axes: Axes, values: Mapping[str, Sequence[Interval]], names: Sequence[str]) -> None:
    """A group of bars with their intervals for every name, in it one for each label, in a colour each."""
    width = 0.8 / len(values)
    for number, (label, intervals) in enumerate(values.items()):
        axes.bar(
            [x + (number - (len(values) - 1) / 2) * width for x in range(len(names))],
            [each.mean for each in intervals],
            yerr=[each.half if math.isfinite(each.half) else 0.0 for each in intervals],
            width=0.92 * width,
            color=COLOURS[number % len(COLOURS)],
            label=label,
            error_kw={"elinewidth": 0.9, "capsize": 2},
        )
    axes.set_xticks(range(len(names)), list(names))
    axes.grid(visible=False, axis="x")


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all axes of a figure, below them: that of these axes."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))


def log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each of these values, and no others."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.minorticks_off()


def as_svg(figure: Figure) -> str:
    """The figure as SVG; its text stays text, so that a browser shows it in fonts that it has."""
    return _saved(figure, "svg").decode()


def as_png(figure: Figure) -> bytes:
    """The figure as PNG."""
    return _saved(figure, "png")


def formula_svg(formula: str) -> str:
    """A formula in matplotlib's mathematical notation, as SVG whose letters are outlines.

    >>> formula_svg(r"\\sqrt{d}").startswith("<?xml")
    True
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.1, 0.1))
    FigureCanvasAgg(figure)
    figure.text(0, 0, f"${formula}$", fontsize=15)
    content = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "manyheads", "mathtext.fontset": "cm"}):
        figure.savefig(content, format="svg", bbox_inches="tight", pad_inches=0.03, transparent=True,
                       metadata={"Date": None})  # fmt: skip
    return content.getvalue().decode()


def _saved(figure: Figure, kind: str) -> bytes:
    from matplotlib import font_manager, rc_context
    from matplotlib.text import Text

    installed = {font.name for font in font_manager.fontManager.ttflist}
    content = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_fontfamily([name for name in FONTS if name in installed])
    # the same figure gives the same bytes
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "manyheads"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()
