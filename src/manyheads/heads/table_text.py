"""A HeadTable as text: what ``print(table)`` shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.heads.table import HeadTable

MOST_ROWS = 60  # of a longer table, the first and the last half of these


def table_text(table: HeadTable) -> str:
    """The rows of a table, a line each: site, layer, head, labels, tokens, and the mean of each metric."""
    columns = ["site", "layer", "head", *table.labels, "tokens", *table.metrics]
    values = {
        name: table[name] if isinstance(table[name], list) else table[name].tolist() for name in columns
    }
    half = MOST_ROWS // 2
    count = len(table)
    numbers = [*range(count)] if count <= MOST_ROWS else [*range(half), *range(count - half, count)]
    cells = [[_cell(values[name][row]) for name in columns] for row in numbers]
    widths = [max(map(len, (name, *(row[i] for row in cells)))) for i, name in enumerate(columns)]
    lines = [_line(columns, widths), *(_line(row, widths) for row in cells)]
    if count > MOST_ROWS:
        lines.insert(half + 1, f"... {count - MOST_ROWS} more heads ...")
    return "\n".join([*lines, f"{count} heads; standard errors are in the columns NAME_se"])


def _cell(value: object) -> str:
    """
    >>> _cell(0.123456), _cell(1222.0), _cell(math.nan), _cell("h.0")
    ('0.123', '1222', '-', 'h.0')
    """
    if not isinstance(value, float):
        return str(value)
    return (
        "-" if math.isnan(value) else f"{value:.0f}" if value.is_integer() and value > 9 else f"{value:.3g}"
    )


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)])
