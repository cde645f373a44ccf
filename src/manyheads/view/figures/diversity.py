"""Figures of which heads are alike: a map with similar heads close together, and matrices of all pairs."""

from __future__ import annotations

from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.common.whole_files import write_whole
from manyheads.heads.diversity.map_layout import islands, stress
from manyheads.heads.diversity.result import head_names
from manyheads.heads.table import HeadTable
from manyheads.view.colour import RAMP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# More names than this overlap: then only the heads nearest to their twins are named.
MOST_NAMES = 100
GREY, DARK = "#777777", "#222222"
# The matrices that are drawn, and their titles.
DRAWN = {
    "js": "attention: Jensen-Shannon distance\n(0: the same attention)",
    "overlap": "attention: overlap\n(probability of attending to the same key)",
    "cka": "outputs: linear CKA\n(1: the same up to rotation)",
    "contribution_cosine": "contributions: cosine\n(red: they add up, blue: they cancel)",
    "gradient_cosine": "gradients: cosine\n(red: the same direction)",
    "query_angle": "query weights: mean angle in degrees\n(0: the same subspace, 90: nothing in common)",
}


def draw_map(table: HeadTable, path: Path, title: str) -> None:
    """Draw all heads as points, those with similar attention close together, coloured by layer; a PNG file.

    Heads that cannot be compared, such as those of an encoder and a decoder, are on separate maps. Thin lines
    lead from each head to its twin, the most similar head.
    """
    from matplotlib.ticker import MaxNLocator

    maps = sorted(islands(table.matrices["js"]), key=lambda heads: -len(heads))
    figure, axes = _figure(len(maps), 8.0, 7.0)
    points = [_draw_one_map(axis, table, heads) for axis, heads in zip(axes, maps, strict=True)]
    bar = figure.colorbar(points[-1], ax=axes, fraction=0.03, pad=0.02)
    bar.set_label("layer", fontsize=9, color=GREY)
    bar.ax.tick_params(labelsize=8, colors=GREY, length=0)
    bar.locator = MaxNLocator(integer=True)
    bar.outline.set_visible(False)
    figure.suptitle(
        f"{title}: heads with similar attention are close together", fontsize=13, color=DARK, parse_math=False
    )
    _save(figure, path)


def _draw_one_map(axis: Axes, table: HeadTable, heads: Tensor) -> PathCollection:
    points_xy = torch.stack([table["x"], table["y"]], 1)
    x, y = points_xy.numpy().T
    layers = torch.tensor(table["layer"])
    names = head_names(table.rows)
    number = {name: row for row, name in enumerate(names)}
    for head in heads.tolist():
        twin = number.get(table["twin"][head])
        if twin is not None:
            axis.plot(x[[head, twin]], y[[head, twin]], color="#cccccc", linewidth=0.7, zorder=1)
    points = axis.scatter(
        x[heads],
        y[heads],
        c=layers[heads],
        cmap="viridis",
        vmin=0,
        vmax=int(layers.max()),
        s=34,
        zorder=2,
        linewidths=0,
    )
    near = table["twin_distance"][heads].nan_to_num(2.0).argsort()[:MOST_NAMES]
    for head in heads[near].tolist():
        axis.annotate(
            names[head].rpartition(".")[2] if ":" in names[head] else names[head],
            (x[head], y[head]), (3.5, 2.5), textcoords="offset points", fontsize=6.5, color=GREY, zorder=3,
        )  # fmt: skip
    off = stress(table.matrices["js"][heads][:, heads], points_xy[heads])
    kinds = ", ".join(dict.fromkeys(table.rows[head].kind for head in heads.tolist()))
    subtitle = f"{len(heads)} heads ({kinds}), a line from each to its twin; distances are off by {off:.0%}"
    axis.set_title(subtitle, fontsize=8.5, color=GREY)
    axis.set_aspect("equal", adjustable="datalim")
    axis.tick_params(labelsize=7, colors=GREY, length=2)
    for edge in axis.spines.values():
        edge.set_color("#dddddd")
    return points


def draw_matrices(table: HeadTable, path: Path, title: str) -> None:
    """Draw the matrices of all pairs of heads side by side, layers marked; a PNG file. Grey: no value."""
    drawn = [name for name in DRAWN if name in table.matrices]
    figure, axes = _figure(len(drawn), 5.2, 4.9)
    sites = [table["site"].count(site) for site in dict.fromkeys(table["site"])]
    ends = torch.tensor([0, *sites]).cumsum(0).tolist()
    layers = [table["layer"][end] for end in ends[:-1]]
    for axis, name in zip(axes, drawn, strict=True):
        # the diagonal compares a head with itself, and would set the scale
        matrix = table.matrices[name].clone().fill_diagonal_(torch.nan)
        values = matrix[matrix.isfinite()]
        low, high = (values.min().item(), values.max().item()) if len(values) else (0.0, 1.0)
        colours = _ramp(falling=name in ("js", "query_angle"))  # light is alike
        if name.endswith("_cosine"):
            low, high = -max(-low, high), max(-low, high)
            colours = _signed()
        image = axis.imshow(matrix.numpy(), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        for end in ends[1:-1]:
            for line in (axis.axhline, axis.axvline):
                line(end - 0.5, color="white", linewidth=0.6 if len(sites) <= 12 else 0.25)
        step = -(-len(sites) // 16)
        middles = [(a + b - 1) / 2 for a, b in pairwise(ends)][::step]
        axis.set_xticks(middles, layers[::step], fontsize=7, color=GREY)
        axis.set_yticks(middles, layers[::step], fontsize=7, color=GREY)
        axis.tick_params(length=0)
        axis.set_title(DRAWN[name], fontsize=9, color=DARK)
        for edge in axis.spines.values():
            edge.set_visible(False)
        bar = figure.colorbar(image, ax=axis, fraction=0.045, pad=0.02)
        bar.ax.tick_params(labelsize=7, colors=GREY, length=0)
        bar.outline.set_visible(False)
    figure.suptitle(
        f"{title}: every pair of heads, layer by layer", fontsize=13, color=DARK, parse_math=False
    )
    _save(figure, path)


def _figure(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of several panels, each of this size in inches, in up to three columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = -(-count // columns)
    size = (width * columns, height * rows + 0.4)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis in axes[count:]:
        axis.axis("off")
    return figure, axes[:count]


def _ramp(falling: bool) -> Colormap:
    """The colour scale from dark to light, or back; grey where there is no value."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = [[c / 255 for c in rgb] for rgb in RAMP]
    ramp = LinearSegmentedColormap.from_list("heads", colours[::-1] if falling else colours)
    return ramp.with_extremes(bad="#dddddd")


def _signed() -> Colormap:
    from matplotlib import colormaps

    return colormaps["RdBu_r"].with_extremes(bad="#dddddd")


def _save(figure: Figure, path: Path) -> None:
    """Write the figure completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=130)
    write_whole(path, png.getvalue())
