"""The attention maps of all heads in one figure."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from manyheads.common.whole_files import write_whole
from manyheads.view.colour import RAMP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Fonts with Chinese, Japanese and Korean, where the machine has one; otherwise such tokens show as boxes.
EAST_ASIAN = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")
# More labels than this are too small to read.
MOST_LABELS = 40
LONGEST_TITLE = 110
# The edges of the maps, as shares of the figure.
LEFT, BOTTOM, TOP = 0.06, 0.095, 0.895
READING = "Each square is one attention head. A row is a query, a column is a key, the colour is the weight."


def draw(weights: Sequence[Tensor], tokens: Sequence[str], path: Path, title: str) -> None:
    """Draw the maps of every layer, each (heads, length, length), into a PNG file, completely or not at all.

    One row of maps for each layer, the first at the top. In a map, rows are queries and columns are keys.
    """
    from matplotlib import font_manager, rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in EAST_ASIAN if name in installed)]
    heads = max(len(layer) for layer in weights)
    with rc_context({"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        side = min(max(1.8, 0.09 * len(tokens)), 3.0)  # of one map, in inches
        figure = Figure(figsize=(side * heads + 2.0, side * len(weights) + 2.2), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(weights), heads, squeeze=False)
        colours = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
        image: AxesImage | None = None
        for n, layer in enumerate(weights):
            for h in range(heads):
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
                _label(axis, tokens, side, left=h == 0, below=n == len(weights) - 1)
                if n == 0:
                    axis.set_title(f"head {h}", fontsize=10, color="#333333")
            axes[n, -1].yaxis.set_label_position("right")
            axes[n, -1].set_ylabel(f"layer {n}", fontsize=10, rotation=270, labelpad=14, color="#333333")
        figure.subplots_adjust(left=LEFT, right=0.935, top=TOP, bottom=BOTTOM, wspace=0.08, hspace=0.08)
        title = " ".join(title.split())
        title = title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 4]} ..."
        figure.suptitle(title, fontsize=16, x=LEFT, y=0.975, ha="left", color="#111111", parse_math=False)
        figure.text(LEFT, 0.935, READING, fontsize=10, color="#555555")
        if image is not None:
            _draw_scale(figure, image)
        path.parent.mkdir(parents=True, exist_ok=True)
        png = BytesIO()
        figure.savefig(png, format="png", dpi=110)
        write_whole(path, png.getvalue())


def _label(axis: Axes, tokens: Sequence[str], side: float, left: bool, below: bool) -> None:
    """Tokens beside the first map of a row and below the last of a column: all maps share them."""
    step = -(-len(tokens) // MOST_LABELS)
    positions = range(0, len(tokens), step)
    size = max(4.0, min(8.0, 64 * side / len(positions)))
    shown = [tokens[i] for i in positions]
    axis.set_xticks(
        positions if below else [], shown if below else [], rotation=90, fontsize=size, parse_math=False
    )
    axis.set_yticks(positions if left else [], shown if left else [], fontsize=size, parse_math=False)
    axis.tick_params(length=0, pad=2, colors="#333333")
    for edge in axis.spines.values():
        edge.set_visible(False)


def _draw_scale(figure: Figure, image: AxesImage) -> None:
    bar = figure.colorbar(
        image, cax=figure.add_axes((0.965, BOTTOM, 0.008, TOP - BOTTOM)), ticks=[0, 0.01, 0.1, 0.25, 0.5, 1]
    )
    bar.ax.set_yticklabels(["0", "1%", "10%", "25%", "50%", "100%"], fontsize=8)
    bar.ax.tick_params(length=0, pad=3, colors="#333333")
    bar.outline.set_visible(False)
