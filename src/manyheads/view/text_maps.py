"""Attention maps drawn with characters, for terminals with and without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from manyheads.view.colour import colour, has_colours

SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"
GAP = 2


def small(weights: Tensor, console: Console) -> list[Text]:
    """A map (rows, columns) as lines: two rows to a line where there are colours, else one, shaded.

    >>> import torch
    >>> plain = Console(color_system=None)
    >>> [line.plain for line in small(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), plain)]
    ['█ ', '▓▓']
    """
    rows = weights.tolist()
    if not has_colours(console):
        return [Text("".join(_shade(weight, console) for weight in row)) for row in rows]
    lines = []
    for upper, lower in zip(rows[::2], [*rows[1::2], None], strict=False):
        line = Text()
        for n, weight in enumerate(upper):
            below = None if lower is None else _rgb(lower[n])
            line.append("▀", Style(color=_rgb(weight), bgcolor=below))
        lines.append(line)
    return lines


def grid(maps: Sequence[Tensor], titles: Sequence[str], console: Console, width: int) -> list[Text]:
    """Small maps side by side, as many as the width takes, each under its title."""
    cell = max(max(maps[0].shape[1], *(cell_len(title) for title in titles)) + GAP, 1)
    across = max(1, width // cell)
    lines = []
    for first in range(0, len(maps), across):
        drawn = [small(weights, console) for weights in maps[first : first + across]]
        header = Text("".join(set_cell_size(title, cell) for title in titles[first : first + across]), "bold")
        lines.append(_fit(header, width))
        for parts in zip(*drawn, strict=True):
            line = Text()
            for part in parts:
                line.append_text(part)
                line.append(" " * (cell - part.cell_len))
            lines.append(_fit(line, width))
        lines.append(Text())
    return lines


def large(weights: Tensor, tokens: Sequence[str], console: Console, width: int) -> list[Text]:
    """One map with its tokens: two characters to a cell, queries on the left, numbers of keys on top."""
    label = min(max(cell_len(token) for token in tokens), max(4, width - 5 - 2 * len(tokens)))
    numbers = "".join(f"{n % 100:>2}" if n % 2 == 0 else "  " for n in range(len(tokens)))
    lines = [_fit(Text(" " * (label + 4) + numbers, "dim"), width)]
    for n, (token, row) in enumerate(zip(tokens, weights.tolist(), strict=True)):
        line = Text(set_cell_size(token, label)).append(f" {n:>2} ", "dim")
        for weight in row:
            if not has_colours(console):
                line.append(_shade(weight, console) * 2)
            else:
                line.append("  ", Style(bgcolor=_rgb(weight)))
        lines.append(_fit(line, width))
    return lines


def scale(console: Console) -> Text:
    """The legend of the colours, or of the shades."""
    line = Text("0 ", "dim")
    for step in range(20 if has_colours(console) else len(SHADES)):
        if has_colours(console):
            line.append(" ", Style(bgcolor=_rgb((step / 19) ** 2)))
        else:
            line.append(_shade(((step + 0.5) / len(SHADES)) ** 2, console) * 3)
    return line.append(" 1", "dim")


def _fit(line: Text, width: int) -> Text:
    line.truncate(width)
    return line


def _shade(weight: float, console: Console) -> str:
    shades = ASCII_SHADES if console.options.ascii_only else SHADES
    return shades[min(int(max(weight, 0.0) ** 0.5 * len(shades)), len(shades) - 1)]


def _rgb(weight: float) -> str:
    return "rgb({},{},{})".format(*colour(weight))
