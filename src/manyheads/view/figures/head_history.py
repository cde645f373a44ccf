"""The figure of heads that changed while training: heads by layer over time."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path

from manyheads.common.whole_files import write_whole
from manyheads.training.dynamic_heads import Act

_MARKS = {
    "cut": ("x", "#a8323e"),
    "reseed": ("o", "#b8560f"),
    "split": ("d", "#2a7f4f"),
    "add": ("+", "#2a7f4f"),
}
_DARK, _GREY = "#222222", "#777777"


def draw(
    history: Sequence[tuple[int, dict[str, int]]], acts: Sequence[Act], steps: int, path: str | PathLike[str]
) -> None:
    """Draw the number of heads of each site as a row over the steps, with a mark for every act.

    Parameters
    ----------
    history, acts: of `DynamicHeads`.
    steps: the number of updates so far.
    path: a .png or .svg file.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
    from numpy import linspace

    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in ("png", "svg"):
        raise ValueError(f"path: got {str(path)!r}; expected a name that ends with .png or .svg")
    if not history:
        raise ValueError("history: no step was made yet; call step() after each update, then draw")
    sites = list(history[0][1])
    edges = [step for step, _ in history] + [max(steps, history[-1][0] + 1)]
    counts = [[heads[site] for _, heads in history] for site in sites]
    most = max(max(row) for row in counts)
    figure = Figure(figsize=(9, 1.9 + 0.3 * len(sites)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    levels = BoundaryNorm([n + 0.5 for n in range(most + 1)], 256)
    rows = [n - 0.5 for n in range(len(sites) + 1)]
    shades = colormaps["Blues"](linspace(0.15, 0.95, 256))  # one head is no white
    mesh = axes.pcolormesh(
        edges, rows, counts, cmap=ListedColormap(shades), norm=levels, edgecolors="white", linewidth=0.4
    )
    for kind_of_act, (mark, colour) in _MARKS.items():
        points = [(act.step, sites.index(act.site)) for act in acts if act.kind == kind_of_act]
        if points:
            axes.plot(
                [step for step, _ in points], [row for _, row in points], mark, color=colour, markersize=6,
                markerfacecolor="none", markeredgewidth=1.3, linestyle="none", label=kind_of_act,
                path_effects=[withStroke(linewidth=3, foreground="white")],
            )  # fmt: skip
    for row in range(len(sites)):
        axes.annotate(
            str(counts[row][-1]), (1.0, row), xycoords=("axes fraction", "data"), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=9, color=_DARK,
        )  # fmt: skip
    axes.set_yticks(range(len(sites)), sites, fontsize=8, color=_DARK)
    axes.invert_yaxis()
    axes.set_xlabel("step", color=_GREY)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    first, last = (sum(heads.values()) for heads in (history[0][1], history[-1][1]))
    axes.set_title(
        f"heads by layer: {first} at the start, {last} after {steps:,} steps", loc="left", fontsize=11
    )
    bar = figure.colorbar(mesh, ax=axes, fraction=0.03, pad=0.06)
    bar.set_label("heads", color=_GREY)
    bar.set_ticks(range(1, most + 1, max(most // 8, 1)))
    bar.outline.set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if acts:
        figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    content = BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    write_whole(Path(path), content.getvalue())
