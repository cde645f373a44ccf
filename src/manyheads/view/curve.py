"""The picture of a pruning curve: quality against heads kept."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from manyheads.surgery.curve import Curve
from manyheads.whole_files import write_whole

_COLOURS = {"elimination": "#1f5fa8", "fisher": "#b8560f", "random": "#808080"}
_OTHER = ("#2a7f4f", "#8a3f8f", "#a8323e")


def draw(found: Curve, path: Path, title: str = "") -> None:
    """Draw a curve into a file; dashed without refit, solid with it; the control is grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    others = iter(_OTHER * 3)
    colours: dict[str, str] = {}
    for name, points in found.lines.items():
        method = name.partition(",")[0]
        if method not in colours:
            colours[method] = _COLOURS.get(method) or next(others)
        line = [(1.0, found.uncut), *points]
        axes.plot(
            [100 * share for share, _ in line],
            [value for _, value in line],
            "-" if "," in name else "--",
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            color=colours[method],
            label=name,
        )
    if found.measure == "perplexity":
        axes.set_yscale("log")
        axes.set_ylabel("perplexity on held-out text (log scale)")
    else:
        axes.set_ylabel(f"{found.measure} on held-out text")
    axes.set_xlabel("heads kept, %")
    axes.invert_xaxis()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=150)
    write_whole(path, png.getvalue())
