"""A figure of attention along sequences: a panel for each sequence, a row for each head."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from manyheads.common.whole_files import write_whole
from manyheads.heads.along_sequence import Along
from manyheads.view.colour import RAMP

# More letters than this along an axis are too small to read: then only every n-th is written.
MOST_LETTERS = 130
GREY, DARK = "#777777", "#222222"


def draw(panels: Sequence[tuple[str, Along, Sequence[str]]], path: Path, title: str) -> None:
    """Draw what heads attend to into a PNG file: a panel for each ``(name, attention, letters)``.

    A row is a head, a column a position with its letter; the colour is the attention, by its square root.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    longest = max(along.weights.shape[1] for _, along, _ in panels)
    heights = [0.16 * len(along.heads) + 0.6 for _, along, _ in panels]
    size = (min(max(0.13 * longest + 1.6, 6.0), 18.0), sum(heights) + 0.8)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    ramp = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
    highest = max(float(along.weights.max()) for _, along, _ in panels)
    images = []
    for axis, (name, along, letters) in zip(axes, panels, strict=True):
        norm = PowerNorm(0.5, 0, highest)
        images.append(
            axis.imshow(along.weights.numpy(), cmap=ramp, norm=norm, interpolation="nearest", aspect="auto")
        )
        step = -(-len(letters) // MOST_LETTERS)
        positions = range(0, len(letters), step)
        axis.set_xticks(positions, [letters[i] for i in positions], fontsize=7, parse_math=False)
        axis.set_yticks(range(len(along.heads)), along.heads, fontsize=7)
        axis.tick_params(length=0, pad=2, colors=DARK)
        axis.set_title(name, fontsize=9, color=DARK, loc="left", parse_math=False)
        for edge in axis.spines.values():
            edge.set_visible(False)
    bar = figure.colorbar(images[-1], ax=list(axes), fraction=0.02, pad=0.01)
    bar.ax.tick_params(labelsize=7, colors=GREY, length=0)
    bar.set_label("share of attention", fontsize=8, color=GREY)
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=12, color=DARK, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_whole(path, png.getvalue())
