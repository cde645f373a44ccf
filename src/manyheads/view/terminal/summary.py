"""A table of heads for the terminal: a small map of layers and heads, and the heads that stand out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from manyheads.capture.site import blanked
from manyheads.common.language import words
from manyheads.common.types import JsonObject
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.colour import colour, has_colours
from manyheads.view.text_maps import ASCII_SHADES, SHADES

WIDEST = 110
# From this share of its attention on one kind of token on, a head is said to look there.
MUCH = 0.4
# ... and at least this many times what even attention would give there.
TIMES = 2.0
# A head whose attention is this near to even (1 is even) spreads over everything.
EVEN = 0.95
# A head whose output is shorter than this part of the median of its layer says little.
QUIET = 0.5
# Heads named in a line, as far as it reaches, and the narrowest and farthest ones.
NAMED = 5


class Target(NamedTuple):
    """A kind of token that heads look at: the column that says how much, a letter for maps, words."""

    column: str
    letter: str
    words: str


# The first that holds gives a head its letter.
TARGETS = (
    Target("previous", "p", "attend to the previous token"),
    Target("next", "n", "attend to the next token"),
    Target("self", "s", "attend to their own token"),
    Target("first", "f", "rest on the first token"),
    Target("special", "x", "rest on special tokens"),
    Target("rare", "r", "look for rare tokens"),
    Target("frequent", "c", "look for common tokens"),
)

Row = JsonObject


def summary(
    table: HeadTable,
    console: Console,
    *,
    title: str = "",
    shares: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print what the heads of a model do, then which sites are not verified, and the notes.

    ``shares`` is how much of the corpus each group of tokens in the table is, e.g. ``{"rare": 0.2}``: a head
    looks for rare tokens when it gives them more attention than that.

    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> sums = {"previous": torch.tensor([[4.0, 4.0], [3.6, 0.2], [3.3, 0.1]])}
    >>> sums["entropy_normalised"] = torch.tensor([[4.0, 4.0], [0.4, 2.0], [0.1, 1.2]])
    >>> table = HeadTable(rows, torch.tensor([4.0, 4.0]), sums)
    >>> summary(table, Console(width=80, color_system=None), title="A model")
    A model
    <BLANKLINE>
    causal h.*.attn: 1 layer, 2 heads
    <BLANKLINE>
      layer   head 0  1
          0        █p ▓
    <BLANKLINE>
      wide ░ ▒ ▓ █ narrow; letters as below, where 3.7 is head 7 of layer 3
    <BLANKLINE>
      p  attend to the previous token  1  0.0 90%
    """
    width = min(console.width, WIDEST)
    show = partial(console.print, width=width)
    if title:
        show(Text(title, "bold"))
    stacks: dict[str, list[Row]] = {}
    for row in table:
        stacks.setdefault(f"{row['kind']} {blanked(row['site'].partition('#')[0])}", []).append(row)
    for stack, rows in stacks.items():
        layers = len({row["layer"] for row in rows})
        heading = Text(stack, "bold cyan").append(
            ": "
            + words(
                "{layers} layer, {heads} heads" if layers == 1 else "{layers} layers, {heads} heads",
                layers=layers,
                heads=len(rows),
            ),
            "not bold default",
        )
        show()
        show(heading)
        if "entropy_normalised" in table.sums:
            show()
            for line in heat_map(rows, console, width - 2, shares):
                console.print(Text("  ").append_text(line), no_wrap=True, overflow="crop")
            show()
            show(Text("  ").append_text(_legend(console)))
        show()
        show(Padding(_outstanding(rows, width - 2, shares), (0, 0, 0, 2), expand=False))
    for note in (*doubts_in(table).sentences(), *notes):
        show(Text("\n" + words("Note: {note}", note=words(note))))


def summary_text(table: HeadTable, **about: Any) -> str:
    """The summary as plain text, 100 columns wide; keywords as in `summary`."""
    text = StringIO()
    summary(table, Console(file=text, width=100, color_system=None, force_terminal=False), **about)
    return text.getvalue()


def target_of(row: Row, shares: Mapping[str, float] | None = None) -> Target | None:
    """The kind of token that a head looks at, if it looks at one.

    >>> target_of({"previous": 0.2, "first": 0.7}).words, target_of({"first": 0.3})
    ('rest on the first token', None)
    >>> target_of({"special": 0.6}, shares={"special": 0.5})
    """
    return next((target for target in TARGETS if _looks_at(row, target, shares)), None)


def _looks_at(row: Row, target: Target, shares: Mapping[str, float] | None) -> bool:
    threshold = max(MUCH, TIMES * (shares or {}).get(target.column, 0.0))
    value = row.get(target.column, math.nan)
    return bool(value >= min(threshold, 1.0))  # false for nan


def heat_map(
    rows: list[Row], console: Console, width: int, shares: Mapping[str, float] | None = None
) -> list[Text]:
    """Layers down, heads across: the narrower the attention, the brighter; a letter for its target."""
    heads = max(row["head"] for row in rows) + 1
    cells = {(row["layer"], row["head"]): row for row in rows}
    layers = sorted({row["layer"] for row in rows})
    left = max(7, len(str(layers[-1])) + 2)
    cell = 3 if left + 5 + 3 * heads <= width else 2 if left + 5 + 2 * heads <= width else 1
    every = 1 if cell == 3 else 5  # as many numbers as there is room for
    shown = min(heads, (width - left - 5) // cell)
    numbers = "".join(f"{h:<{cell * every}}" for h in range(0, shown, every))
    heading = " " * (5 - cell_len(words("layer"))) + words("layer") + "   " + set_cell_size(words("head"), 5)
    lines = [Text(f"{heading}{numbers}".rstrip(), "dim")]
    for layer in layers:
        line = Text().append(f"{layer:>5}        ", "dim")
        for head in range(shown):
            row = cells.get((layer, head))
            line.append_text(Text(" " * cell) if row is None else _cell(row, console, cell, shares))
        if not has_colours(console):
            line.rstrip()
        lines.append(line)
    if shown < heads:
        missing = words(
            "heads {first} to {last} do not fit here; they are in the table", first=shown, last=heads - 1
        )
        lines.append(Text(missing, "dim"))
    return lines


def _cell(row: Row, console: Console, cell: int, shares: Mapping[str, float] | None) -> Text:
    target = target_of(row, shares)
    letter = target.letter if target else " "
    focus = _focus(row)
    if not has_colours(console):
        return Text(
            f"{_shade(focus, console)}{letter} "[:cell]
            if cell > 1
            else letter.strip() or _shade(focus, console)
        )
    red, green, blue = colour(focus**2)
    ink = "black" if red + green + blue > 380 else "white"
    text = f"{letter} " if cell == 2 else f" {letter} " if cell == 3 else letter
    return Text(text, Style(color=ink, bgcolor=f"rgb({red},{green},{blue})", bold=True))


def _focus(row: Row) -> float:
    """1 for all attention on one token, 0 for even attention."""
    value = 1.0 - row["entropy_normalised"]
    return 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)


def _shade(value: float, console: Console) -> str:
    shades = _shades(console)
    return shades[min(int(value * len(shades)), len(shades) - 1)]


def _shades(console: Console) -> str:
    """Without the blank one, which stands for no head."""
    return (ASCII_SHADES if console.options.ascii_only else SHADES)[1:]


def _legend(console: Console) -> Text:
    if not has_colours(console):
        line = Text(f"{words('wide')} {' '.join(_shades(console))} {words('narrow')}")
    else:
        line = Text(f"{words('wide')} ")
        for step in range(20):
            line.append(" ", Style(bgcolor="rgb({},{},{})".format(*colour((step / 19) ** 2))))
        line.append(f" {words('narrow')}")
    return line.append("; " + words("letters as below, where 3.7 is head 7 of layer 3"), "dim")


def _outstanding(rows: list[Row], width: int, shares: Mapping[str, float] | None) -> Table:
    """The heads that stand out: a letter, why, how many, and which (layer.head)."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    named = max(1, min(NAMED, (width - 46) // 12))
    for style in ("bold", "", "bold", *[""] * named):
        table.add_column(style=style, justify="right" if style and table.columns else "left", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)

    def add(letter: str, what: str, heads: list[Row], column: str, form: str, rising: bool = False) -> None:
        if heads:
            heads = sorted(heads, key=lambda row: row[column], reverse=not rising)
            names = [Text(f"{row['layer']}.{row['head']} ").append(form.format(row[column]), "dim")
                     for row in heads[:named]]  # fmt: skip
            names += [Text()] * (named - len(names))
            table.add_row(letter, words(what), str(len(heads)), *names, "..." if len(heads) > named else "")

    targets = [(row, target_of(row, shares)) for row in rows]
    for kind in TARGETS:
        heads = [row for row, target in targets if target == kind]
        add(kind.letter, kind.words, heads, kind.column, "{:.0%}")
    add("", "spread almost evenly", _with(rows, "entropy_normalised", EVEN), "entropy_normalised", "{:.0%}")
    add("", "say little, against their layer", _quiet(rows), "quiet", "{:.0%}", rising=True)
    narrow = sorted(_with(rows, "effective_keys", 0.0), key=lambda row: row["effective_keys"])[:named]
    add("", "the narrowest: on how many tokens", narrow, "effective_keys", "{:.1f}", rising=True)
    far = sorted(_with(rows, "distance", 0.0), key=lambda row: -row["distance"])[:named]
    add("", "the farthest: how many tokens away", far, "distance", "{:.1f}")
    return table


def _with(rows: list[Row], column: str, least: float) -> list[Row]:
    return [row for row in rows if row.get(column, math.nan) >= least]


def _quiet(rows: list[Row]) -> list[Row]:
    """Heads with an output far shorter than the median of their site; ``quiet`` is the ratio to it."""
    heads = []
    for site in {row["site"]: None for row in rows}:
        here = [row for row in _with(rows, "output_norm", 0.0) if row["site"] == site]
        median = sorted(row["output_norm"] for row in here)[len(here) // 2] if here else 0.0
        heads += [
            row | {"quiet": row["output_norm"] / median}
            for row in here
            if row["output_norm"] < QUIET * median
        ]
    return heads
