"""The figure of a pruning curve: quality against heads kept."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path

from manyheads.common.whole_files import write_whole
from manyheads.surgery.pruning_curve import PruningCurve

_COLOURS = {"elimination": "#1f5fa8", "fisher": "#b8560f", "random": "#808080"}
_OTHER = ("#2a7f4f", "#8a3f8f", "#a8323e")


def draw(curve: PruningCurve, path: Path, title: str = "") -> None:
    """Draw a curve with standard errors; dashed without refit, solid with it; the control is grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    others = iter(_OTHER * 3)
    colours: dict[str, str] = {}
    for name, points in curve.lines.items():
        method = name.partition(",")[0]
        if method not in colours:
            colours[method] = _COLOURS.get(method) or next(others)
        line = [(1.0, curve.uncut[0], 0.0), *points]
        axes.errorbar(
            [100 * share for share, _, _ in line],
            [value for _, value, _ in line],
            yerr=[0.0 if math.isnan(error) else error for _, _, error in line],
            fmt="o-" if "," in name else "o--",
            markersize=3.5,
            linewidth=1.6,
            elinewidth=0.8,
            color=colours[method],
            label=name,
        )
    where = (
        f"{curve.sequences:,} held-out sequences; bars: standard error of the change"
        if curve.sequences
        else ""
    )
    axes.set_ylabel(f"{curve.measure}{' (log scale)' if curve.measure == 'perplexity' else ''}")
    if curve.measure == "perplexity":
        axes.set_yscale("log")
    axes.set_xlabel("heads kept, %")
    axes.invert_xaxis()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("\n".join(filter(None, [title, where])), loc="left", fontsize=11)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=150)
    write_whole(path, png.getvalue())
