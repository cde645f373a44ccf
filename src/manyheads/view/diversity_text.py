"""Which heads are alike, told to a person: layer by layer, and the pairs that stand out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from io import StringIO

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.heads.diversity.map_layout import islands, stress
from manyheads.heads.diversity.result import head_names
from manyheads.heads.diversity.summary import Layer, distinct, extreme, layers
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in

PAIRS = 6
# Groups are told one by one up to this many, and in each the first so many heads.
GROUPS, NAMED = 8, 14
# From this mean silhouette on, groups of heads are apart rather than a continuum that was cut.
APART = 0.25

# Matrices whose extreme pairs are told: name, whether the largest, what such pairs do.
TOLD = (
    ("js", False, "look at the same places (Jensen-Shannon distance: 0 the same, 1 nothing in common)"),
    ("cka", True, "say the same (linear CKA of outputs: 1 the same up to rotation)"),
    ("contribution_cosine", True, "add up (cosine of what they add to the residual stream)"),
    ("contribution_cosine", False, "cancel each other (the same cosine, below zero)"),
    ("gradient_cosine", True, "pull the model's output the same way (cosine of their gates' gradients)"),
    ("gradient_cosine", False, "pull it opposite ways"),
)


def tell(table: HeadTable, console: Console, *, title: str = "", notes: Sequence[str] = ()) -> None:
    """Print how different the heads of each layer are, which pairs of heads stand out, and their groups.

    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> js = torch.tensor([[0.0, 0.3], [0.3, 0.0]], dtype=torch.float64)
    >>> table = HeadTable(rows, torch.tensor([4.0, 4.0]), {}, matrices={"js": js, "js_divergence": js**2})
    >>> tell(table, Console(width=80, color_system=None))
    Layer by layer, mean over pairs of heads
    <BLANKLINE>
      layer  heads    JS  spread  distinct
          0      2  0.30       -       1.2
    <BLANKLINE>
    distinct: effective number of heads that look at different places.
    <BLANKLINE>
    Pairs that look at the same places (Jensen-Shannon distance: 0 the same, 1
    nothing in common)
      0.0 0.1  0.300
    """
    width = min(console.width, 110)
    found = layers(table)
    if title:
        console.print(Text(title, style="bold"), width=width)
        console.print()
    _tell_layers(table, found, console, width)
    for name, largest, words in TOLD:
        _tell_pairs(table, console, name, largest, words, width)
    if "cluster" in table.sums:
        _tell_groups(table, console, width)
    for note in (*doubts_in(table).sentences(), *notes):
        console.print(Text(f"\nNote: {note}"), width=width)


def as_text(table: HeadTable, *, title: str = "", notes: Sequence[str] = ()) -> str:
    """The same as plain text, 110 columns wide."""
    text = StringIO()
    console = Console(file=text, width=110, color_system=None, force_terminal=False)
    tell(table, console, title=title, notes=notes)
    return text.getvalue()


def _tell_layers(table: HeadTable, found: Sequence[Layer], console: Console, width: int) -> None:
    several = len({layer.layer for layer in found}) < len(found)
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("  site" if several else "  layer", justify="left" if several else "right")
    columns: list[tuple[str, list[str]]] = [("heads", [str(layer.heads) for layer in found])]
    for name, heading in (("js", "JS"), ("overlap", "overlap"), ("cka", "CKA")):
        if name in table.matrices:
            columns.append((heading, _numbers(layer.mean[name] for layer in found)))
            if name == "js":
                columns.append(("spread", _numbers(layer.spread[name] for layer in found)))
    if "query_angle" in table.matrices:
        roles = [_numbers((x.mean[f"{role}_angle"] for x in found), 0) for role in ("query", "key", "value")]
        columns.append(("q/k/v°", ["/".join(angles) for angles in zip(*roles, strict=True)]))
    if "js_divergence" in table.matrices:
        columns.append(("distinct", _numbers((layer.distinct_attention for layer in found), 1)))
    if "cka" in table.matrices:
        columns.append(("by outputs", _numbers((layer.distinct_outputs for layer in found), 1)))
        ranks = [f"{_number(layer.rank, 0)} ({_number(layer.rank_99, 0)})" for layer in found]
        columns.append(("rank (99%)", ranks))
    for heading, _ in columns:
        shown.add_column(heading, justify="right")
    for row, layer in enumerate(found):
        name = f"  {layer.site}" if several else str(layer.layer)
        shown.add_row(name, *(values[row] for _, values in columns))
    console.print(Text("Layer by layer, mean over pairs of heads", style="bold"), width=width)
    console.print()
    console.print(shown, width=width)
    console.print()
    explained = []
    if "js_divergence" in table.matrices:
        explained.append("distinct: effective number of heads that look at different places")
    if "cka" in table.matrices:
        explained.append("by outputs: of heads that say different things")
        explained.append("rank: directions that all outputs of a layer span together, and how many hold 99%")
    if "query_angle" in table.matrices:
        explained.append("q/k/v°: mean angle between what two heads read as queries, keys, values")
    if explained:
        console.print(Text(f"{'; '.join(explained)}."), width=width)
    _tell_most_redundant(table, found, console, width)


def _tell_most_redundant(table: HeadTable, found: Sequence[Layer], console: Console, width: int) -> None:
    """The layers with the fewest distinct heads for their size, and all heads together."""
    parts = []
    for name, words in (("distinct_attention", "attention"), ("distinct_outputs", "outputs")):
        known = [layer for layer in found if math.isfinite(getattr(layer, name)) and layer.heads > 1]
        if len(known) > 1:
            least = min(known, key=lambda layer: getattr(layer, name) / layer.heads)
            number = f"{getattr(least, name):.1f} of {least.heads}"
            parts.append(f"by {words} {_site(least, found)} ({number} heads are distinct)")
    if parts:
        console.print(Text(f"\nMost redundant: {', '.join(parts)}."), width=width)
    if "js" not in table.matrices:
        return
    for heads in islands(table.matrices["js"]):
        numbers = [
            f"{number:.1f} by {words}"
            for number, words in zip(distinct(table, heads), ("attention", "outputs"), strict=True)
            if math.isfinite(number)
        ]
        if len(parts) and numbers:
            kind = table.rows[int(heads[0])].kind
            console.print(
                Text(f"All {len(heads)} heads ({kind}) together count as {', '.join(numbers)}."), width=width
            )


def _site(layer: Layer, found: Sequence[Layer]) -> str:
    alone = sum(other.layer == layer.layer for other in found) == 1
    return f"layer {layer.layer}" if alone else layer.site


def _tell_pairs(table: HeadTable, console: Console, name: str, largest: bool, words: str, width: int) -> None:
    if name not in table.matrices:
        return
    signed = name.endswith("_cosine")
    pairs = [
        pair
        for pair in extreme(table, name, PAIRS, largest)
        if not signed or (pair.value > 0 if largest else pair.value < 0)
    ]
    if not pairs:
        return
    console.print(Text(f"\nPairs that {words}", style="bold"), width=width)
    number = {head: row for row, head in enumerate(head_names(table.rows))}
    for pair in pairs:
        place = number[pair.one], number[pair.other]
        line = f"  {pair.one} {pair.other}  {pair.value:.3f}"
        if f"{name}_se" in table.matrices:
            line += f" ± {table.matrices[f'{name}_se'][place]:.3f}"
        others = [
            f"{heading} {table.matrices[other][place]:.2f}"
            for other, heading in (("js", "JS"), ("overlap", "overlap"), ("cka", "CKA"),
                                   ("contribution_cosine", "contribution"))
            if other in table.matrices and other != name
        ]  # fmt: skip
        console.print(Text(f"{line}   {', '.join(others)}".rstrip()), width=width)


def _tell_groups(table: HeadTable, console: Console, width: int) -> None:
    cluster, names = table["cluster"].long().tolist(), head_names(table.rows)
    silhouette = table["silhouette"].mean().item()
    clear = "they are apart" if silhouette >= APART else "they shade into each other"
    count = len(set(cluster))
    console.print(
        Text(
            f"\nGroups of heads that look alike: {count} (silhouette {silhouette:.2f}: {clear})", style="bold"
        ),
        width=width,
    )
    for group in range(min(count, GROUPS)):
        heads = [name for name, its in zip(names, cluster, strict=True) if its == group]
        more = f" and {len(heads) - NAMED} more" if len(heads) > NAMED else ""
        console.print(Text(f"  {len(heads):3d}  {' '.join(heads[:NAMED])}{more}"), width=width)
    off = stress(table.matrices["js"], torch.stack([table["x"], table["y"]], 1))
    console.print(Text(f"On the map, distances are off by {off:.0%}."), width=width)


def _numbers(values: Iterable[float], digits: int = 2) -> list[str]:
    return [_number(value, digits) for value in values]


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
