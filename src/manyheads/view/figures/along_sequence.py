"""Attention along sequences, drawn: a panel for each, a row for each head."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from manyheads.common.whole_files import write_whole
from manyheads.heads.along_sequence import Along
from manyheads.view.colour import RAMP

# More letters than this along one line are smaller than an eye can read: then every few are written.
MOST_LETTERS = 130
GREY, DARK = "#777777", "#222222"


def draw(panels: Sequence[tuple[str, Along, Sequence[str]]], path: Path, title: str) -> None:
    """Draw where heads look into a PNG file: a panel for each ``(name, attention, letters of the places)``.

    A row is a head, a column a place; the colour is the share of attention, by its square root.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    longest = max(found.weights.shape[1] for _, found, _ in panels)
    heights = [0.16 * len(found.heads) + 0.6 for _, found, _ in panels]
    size = (min(max(0.13 * longest + 1.6, 6.0), 18.0), sum(heights) + 0.8)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    ramp = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
    highest = max(float(found.weights.max()) for _, found, _ in panels)
    image: Any = None
    for axis, (name, found, letters) in zip(axes, panels, strict=True):
        norm = PowerNorm(0.5, 0, highest)
        image = axis.imshow(
            found.weights.numpy(), cmap=ramp, norm=norm, interpolation="nearest", aspect="auto"
        )
        step = -(-len(letters) // MOST_LETTERS)
        places = range(0, len(letters), step)
        axis.set_xticks(places, [letters[place] for place in places], fontsize=7, parse_math=False)
        axis.set_yticks(range(len(found.heads)), found.heads, fontsize=7)
        axis.tick_params(length=0, pad=2, colors=DARK)
        axis.set_title(name, fontsize=9, color=DARK, loc="left", parse_math=False)
        for edge in axis.spines.values():
            edge.set_visible(False)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.02, pad=0.01)
    bar.ax.tick_params(labelsize=7, colors=GREY, length=0)
    bar.set_label("share of attention", fontsize=8, color=GREY)
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=12, color=DARK, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_whole(path, png.getvalue())
