"""The attention maps of all heads in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from torch import Tensor

from manyheads.common.language import words
from manyheads.common.whole_files import write_whole
from manyheads.view.colour import RAMP
from manyheads.view.figures.fonts import with_fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# More labels than this are too small to read.
MOST_LABELS = 40
LONGEST_TITLE = 110
# The margins of the maps, in inches: tokens on the left and below, a scale on the right, the title above.
LEFT, RIGHT, BOTTOM, TOP = 1.0, 1.15, 0.95, 1.25
CHARACTERS = 13  # of the line below the title that fit an inch


def draw(weights: Sequence[Tensor], tokens: Sequence[str], path: Path, title: str) -> str:
    """Draw the maps of every layer, each (heads, length, length), into a PNG file, completely or not at all.

    One row of maps for each layer, the first at the top. In a map, rows are queries and columns are keys.
    Returns the note about characters that no font here has; empty if there are none.
    """
    png, note = picture(weights, tokens, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, png)
    return note


def picture(
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    title: str,
    *,
    rows: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[str] | None = None,
) -> tuple[bytes, str]:
    """The figure of `draw` as PNG, and its note.

    ``rows`` are the names of the rows of maps, layers without them; ``heads`` the numbers of the columns;
    ``queries`` are the tokens of the rows inside a map, where they are not ``tokens``, those of the columns.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    across = max(len(layer) for layer in weights)
    reading = words(
        "Each square is one attention head. A row is a query, a column is a key, the colour is the weight."
    )
    with with_fonts([*tokens, title, reading]) as note:
        side = min(max(1.8, 0.09 * len(tokens)), 3.0)  # of one map, in inches
        width, height = side * across + LEFT + RIGHT, side * len(weights) + BOTTOM + TOP
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(weights), across, squeeze=False)
        colours = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
        image: AxesImage | None = None
        for n, layer in enumerate(weights):
            for h in range(across):
                axis = axes[n, h]
                if h >= len(layer):
                    axis.axis("off")
                    continue
                image = axis.imshow(
                    layer[h].numpy(),
                    cmap=colours,
                    norm=PowerNorm(0.5, 0, 1),
                    interpolation="nearest",
                    aspect="auto",
                )
                if h == 0:
                    _label(axis.yaxis, tokens if queries is None else queries, side, 0)
                else:
                    axis.set_yticks([])
                if n == len(weights) - 1:
                    _label(axis.xaxis, tokens, side, 90)
                else:
                    axis.set_xticks([])
                axis.tick_params(length=0, pad=2, colors="#333333")
                axis.set_frame_on(False)
                if n == 0:
                    number = h if heads is None else heads[h]
                    axis.set_title(words("head {head}", head=number), fontsize=10, color="#333333")
            axes[n, -1].yaxis.set_label_position("right")
            name = words("layer {layer}", layer=n) if rows is None else rows[n]
            axes[n, -1].set_ylabel(name, fontsize=10, rotation=270, labelpad=14, color="#333333")
        left, right, bottom, top = LEFT / width, 1 - RIGHT / width, BOTTOM / height, 1 - TOP / height
        figure.subplots_adjust(left=left, right=right, top=top, bottom=bottom, wspace=0.08, hspace=0.08)
        title = " ".join(title.split())
        title = title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 4]} ..."
        sizes = {
            "fontsize": 16 if width > 9 else 12,
            "x": left,
            "y": 1 - 0.2 / height,
            "ha": "left",
            "va": "top",
        }
        figure.suptitle(title, color="#111111", parse_math=False, **sizes)
        lines = "\n".join(wrap(f"{reading} {note}".strip(), int(CHARACTERS * (width - LEFT))))
        figure.text(
            left, 1 - 0.55 / height, lines, fontsize=10 if width > 9 else 8, va="top", color="#555555"
        )
        if image is not None:
            bar = figure.add_axes((1 - 0.62 / width, bottom, 0.12 / width, top - bottom))
            _draw_scale(figure, image, bar)
        png = BytesIO()
        figure.savefig(png, format="png", dpi=110)
        return png.getvalue(), note


def _label(axis: Axis, tokens: Sequence[str], side: float, rotation: int) -> None:
    """Tokens beside the first map of a row and below the last of a column: all maps share them."""
    positions = range(0, len(tokens), -(-len(tokens) // MOST_LABELS))
    size = max(4.0, min(8.0, 64 * side / len(positions)))
    shown = [tokens[i] for i in positions]
    axis.set_ticks(positions, shown, rotation=rotation, fontsize=size, parse_math=False)


def _draw_scale(figure: Figure, image: AxesImage, axes: Axes) -> None:
    bar = figure.colorbar(image, cax=axes, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1%", "10%", "25%", "50%", "100%"], fontsize=8)
    bar.ax.tick_params(length=0, pad=3, colors="#333333")
    bar.outline.set_visible(False)
