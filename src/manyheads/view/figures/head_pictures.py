"""Pictures of heads for notebooks and files: a map, and a table with a cell for each head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from manyheads.capture.site import blanked
from manyheads.common.language import words
from manyheads.heads.table import HeadTable
from manyheads.view.colour import RAMP
from manyheads.view.figures.attention_maps import picture
from manyheads.view.figures.fonts import with_fonts

MOST_SEQUENCES = 8
CELL = 0.42  # inches


def map_picture(shown: Any) -> bytes:
    """A PNG of a `Map`: the maps of some heads at one site; one row of maps for each of the first sequences.

    Rows and columns are labelled by position; pooled maps by the first position that was pooled.
    """
    weights = shown.weights[:MOST_SEQUENCES].float().cpu()
    columns = [str(key * shown.column_size) for key in range(weights.shape[3])]
    queries = [str(query) for query in shown.queries[:: shown.row_size]]
    rows = [words("sequence {number}", number=number) for number in range(len(weights))]
    title = shown.site.name or "attention"
    return picture(list(weights), columns, title, rows=rows, heads=shown.heads, queries=queries)[0]


def table_picture(table: HeadTable, metric: str | None = None) -> bytes:
    """A PNG with a cell for each head, a row for each layer: normalised entropy, or another metric.

    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> table = HeadTable(rows, torch.ones(2), {"entropy": torch.ones(3, 2)})
    >>> table_picture(table)[1:4]
    b'PNG'
    """
    if metric is None:
        metric = next((name for name in ("entropy_normalised", *table.metrics) if name in table.sums), "")
    values = table[metric].tolist() if metric else [math.nan] * len(table)
    return grid_picture(table, values, metric.replace("_", " "))


def grid_picture(
    table: HeadTable,
    values: Sequence[float],
    title: str,
    *,
    marks: Mapping[int, str] | None = None,
    note: str = "",
) -> bytes:
    """A PNG with a cell for each row of a table, coloured by ``values``; one block for each stack of layers.

    ``marks`` are short texts in the cells of some rows.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    stacks: dict[str, list[int]] = {}
    for number, row in enumerate(table.rows):
        stacks.setdefault(f"{row.kind} {blanked(row.site.partition('#')[0])}", []).append(number)
    layers = {name: sorted({table.rows[i].layer for i in rows}) for name, rows in stacks.items()}
    across = max((table.rows[i].head for rows in stacks.values() for i in rows), default=0) + 1
    heights = [len(each) for each in layers.values()] or [1]
    size = max(CELL * across + 1.8, 5.0), CELL * sum(heights) + 0.8 * len(heights) + 0.9
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min([*finite, 0.0]), max(finite, default=1.0))
    colours = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
    with with_fonts([title, note]) as missing:
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        image = None
        for axis, (name, rows) in zip(axes, stacks.items(), strict=False):
            cells = [[math.nan] * across for _ in layers[name]]
            for i in rows:
                cells[layers[name].index(table.rows[i].layer)][table.rows[i].head] = values[i]
            image = axis.imshow(cells, cmap=colours, vmin=low, vmax=max(high, low + 1e-12), aspect="auto")
            for i in rows:
                if marks and i in marks:
                    y, dark = layers[name].index(table.rows[i].layer), values[i] <= 0.6 * high
                    ink = "#ffffff" if dark else "#111111"
                    axis.text(
                        table.rows[i].head, y, marks[i], ha="center", va="center", color=ink, fontsize=7
                    )
            axis.set_title(name, fontsize=9, loc="left", color="#333333")
            axis.set_xticks(range(across), [str(h) for h in range(across)], fontsize=7)
            axis.set_yticks(range(len(layers[name])), [str(n) for n in layers[name]], fontsize=7)
            axis.set_ylabel(words("layer"), fontsize=8)
            axis.tick_params(length=0, colors="#333333")
        axes[-1].set_xlabel(f"{words('head')}\n{note} {missing}".strip(), fontsize=8)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
        if image is not None:
            figure.colorbar(image, ax=list(axes), shrink=0.8).ax.tick_params(labelsize=7)
        png = BytesIO()
        figure.savefig(png, format="png", dpi=110)
        return png.getvalue()
