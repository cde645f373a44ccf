"""Which heads are alike, for the terminal: layer by layer, and the pairs that stand out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.language import words
from manyheads.data.batches import Corpus, CorpusSummary
from manyheads.heads.diversity.map_layout import islands, stress
from manyheads.heads.diversity.result import head_names
from manyheads.heads.diversity.summary import Layer, distinct, extreme, layers
from manyheads.heads.measurements.verbs import ComparedPairs
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.figures.diversity import draw_map, draw_matrices
from manyheads.view.terminal.presentation import MeasuredPresentation, plain_text, write_results

PAIRS = 6
# Groups that are listed, and the heads that are named in each of them.
GROUPS, NAMED = 8, 14
# From this mean silhouette on, groups of heads are separate rather than parts of a continuum.
APART = 0.25

# Matrices whose extreme pairs are listed: name, whether the largest, what such pairs do.
EXTREMES = (
    ("js", False, "look at the same places (Jensen-Shannon distance: 0 the same, 1 nothing in common)"),
    ("cka", True, "say the same (linear CKA of outputs: 1 the same up to rotation)"),
    ("contribution_cosine", True, "add up (cosine of what they add to the residual stream)"),
    ("contribution_cosine", False, "cancel each other (the same cosine, below zero)"),
    ("gradient_cosine", True, "pull the model's output the same way (cosine of their gates' gradients)"),
    ("gradient_cosine", False, "pull it opposite ways"),
)


def print_diversity(
    table: HeadTable, console: Console, *, title: str = "", notes: Sequence[str] = ()
) -> None:
    """Print how different the heads of each layer are, which pairs of heads stand out, and their groups.

    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> js = torch.tensor([[0.0, 0.3], [0.3, 0.0]], dtype=torch.float64)
    >>> table = HeadTable(rows, torch.tensor([4.0, 4.0]), {}, matrices={"js": js, "js_divergence": js**2})
    >>> print_diversity(table, Console(width=80, color_system=None))
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
    by_layer = layers(table)
    if title:
        console.print(Text(title, style="bold"), width=width)
        console.print()
    _print_layers(table, by_layer, console, width)
    for name, largest, such in EXTREMES:
        _print_pairs(table, console, name, largest, such, width)
    if "cluster" in table.sums:
        _print_groups(table, console, width)
    for note in (*doubts_in(table).sentences(), *notes):
        console.print(Text("\n" + words("Note: {note}", note=words(note))), width=width)


def diversity_text(table: HeadTable, *, title: str = "", notes: Sequence[str] = ()) -> str:
    """The same as plain text."""
    return plain_text(lambda console: print_diversity(table, console, title=title, notes=notes))


@dataclass(frozen=True)
class DiversityPresentation(MeasuredPresentation):
    """How different the heads of a model are on a corpus, and the folder for files and figures."""

    pairs: ComparedPairs
    model: str
    corpus: Corpus | CorpusSummary
    out: Path

    @property
    def table(self) -> HeadTable:
        """The table."""
        return self.pairs.table

    @property
    def read(self) -> str:
        """How much of the corpus was read."""
        return words("{read} of {total} batches", read=self.pairs.read, total=self.pairs.total)

    @property
    def notes(self) -> list[str]:
        """What `diversity` warned of, whether Ctrl-C ended it, and notes about the corpus."""
        early = self.pairs.read < self.pairs.total
        stopped = [words("Stopped by Ctrl-C: these are the numbers of {read}.", read=self.read)] * early
        return [*self.pairs.notes, *self.corpus.notes, *stopped]

    @property
    def title(self) -> str:
        """The first line of the summary."""
        tokens = int(self.table["tokens"].max())
        return words(
            "{model} on {corpus}: {heads} heads, {tokens:,} tokens",
            model=self.model, corpus=words(self.corpus.what), heads=len(self.table), tokens=tokens,
        )  # fmt: skip

    def show(self, console: Console) -> None:
        """The summary."""
        print_diversity(self.table, console, title=self.title, notes=self.notes)

    def document(self) -> dict[str, object]:
        """The table with its matrices, and the summary of each layer."""
        return {
            "model": self.model,
            "fingerprint": self.table.model,
            "corpus": self.corpus.what,
            "notes": self.notes,
            **doubts_in(self.table).as_json(),
            "out": str(self.out),
            "layers": [layer._asdict() for layer in layers(self.table)],
            "heads": list(self.table),
            "matrices": self.table.matrices,
        }

    def write(self) -> list[str]:
        """diversity.json, diversity.txt, map.png where attention was compared, matrices.png."""
        pairs, summary = write_results(
            self.table, plain_text(self.show), self.out, ["diversity.json"], "diversity.txt"
        )
        sentences = [
            words("Every pair, to load in Python: {file}", file=pairs),
            words("This summary: {file}", file=summary),
        ]
        with Console(stderr=True).status(words("Drawing")):
            if "js" in self.table.matrices:
                draw_map(self.table, self.out / "map.png", self.model)
                sentences.append(words("The map of all heads: {file}", file=self.out / "map.png"))
            draw_matrices(self.table, self.out / "matrices.png", self.model)
        return [*sentences, words("The matrices of all pairs: {file}", file=self.out / "matrices.png")]

    def ending(self, interrupted: bool) -> str | None:
        """The sentence for a comparison that Ctrl-C ended."""
        if not interrupted:
            return None
        return words("Stopped after {read}; their results are kept.", read=self.read)


def _print_layers(table: HeadTable, by_layer: Sequence[Layer], console: Console, width: int) -> None:
    has_repeated_layers = len({layer.layer for layer in by_layer}) < len(by_layer)
    layer_table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    layer_table.add_column(
        f"  {words('site') if has_repeated_layers else words('layer')}",
        justify="left" if has_repeated_layers else "right",
    )
    columns: list[tuple[str, list[str]]] = [(words("heads"), [str(layer.heads) for layer in by_layer])]
    for name, heading in (("js", "JS"), ("overlap", words("overlap")), ("cka", "CKA")):
        if name in table.matrices:
            columns.append((heading, _numbers(layer.mean[name] for layer in by_layer)))
            if name == "js":
                columns.append((words("spread"), _numbers(layer.spread[name] for layer in by_layer)))
    if "query_angle" in table.matrices:
        roles = [
            _numbers((x.mean[f"{role}_angle"] for x in by_layer), 0) for role in ("query", "key", "value")
        ]
        columns.append(("q/k/v°", ["/".join(angles) for angles in zip(*roles, strict=True)]))
    if "js_divergence" in table.matrices:
        columns.append((words("distinct"), _numbers((layer.distinct_attention for layer in by_layer), 1)))
    if "cka" in table.matrices:
        columns.append((words("by outputs"), _numbers((layer.distinct_outputs for layer in by_layer), 1)))
        ranks = [f"{_number(layer.rank, 0)} ({_number(layer.rank_99, 0)})" for layer in by_layer]
        columns.append((words("rank (99%)"), ranks))
    for heading, _ in columns:
        layer_table.add_column(heading, justify="right")
    for row, layer in enumerate(by_layer):
        name = f"  {layer.site}" if has_repeated_layers else str(layer.layer)
        layer_table.add_row(name, *(values[row] for _, values in columns))
    console.print(Text(words("Layer by layer, mean over pairs of heads"), style="bold"), width=width)
    console.print()
    console.print(layer_table, width=width)
    console.print()
    explained = []
    if "js_divergence" in table.matrices:
        explained.append(words("distinct: effective number of heads that look at different places"))
    if "cka" in table.matrices:
        explained.append(words("by outputs: of heads that say different things"))
        explained.append(
            words("rank: directions that all outputs of a layer span together, and how many hold 99%")
        )
    if "query_angle" in table.matrices:
        explained.append(words("q/k/v°: mean angle between what two heads read as queries, keys, values"))
    if explained:
        console.print(Text(f"{'; '.join(explained)}."), width=width)
    _print_most_redundant(table, by_layer, console, width)


def _print_most_redundant(table: HeadTable, by_layer: Sequence[Layer], console: Console, width: int) -> None:
    """The layers with the fewest distinct heads for their size, and all heads together."""
    parts = []
    for name, by in (("distinct_attention", words("attention")), ("distinct_outputs", words("outputs"))):
        measured = [layer for layer in by_layer if math.isfinite(getattr(layer, name)) and layer.heads > 1]
        if len(measured) > 1:
            least = min(measured, key=lambda layer: getattr(layer, name) / layer.heads)
            parts.append(
                words(
                    "by {measure} {site} ({distinct:.1f} of {heads} heads are distinct)",
                    measure=by, site=_site(least, by_layer), distinct=getattr(least, name), heads=least.heads,
                )
            )  # fmt: skip
    if parts:
        console.print(Text("\n" + words("Most redundant: {layers}.", layers=", ".join(parts))), width=width)
    if "js" not in table.matrices:
        return
    for heads in islands(table.matrices["js"]):
        numbers = [
            words("{number:.1f} by {measure}", number=number, measure=words(measure))
            for number, measure in zip(distinct(table, heads), ("attention", "outputs"), strict=True)
            if math.isfinite(number)
        ]
        if len(parts) and numbers:
            kind = table.rows[int(heads[0])].kind
            sentence = words(
                "All {count} heads ({kind}) together count as {numbers}.",
                count=len(heads), kind=kind, numbers=", ".join(numbers),
            )  # fmt: skip
            console.print(Text(sentence), width=width)


def _site(layer: Layer, by_layer: Sequence[Layer]) -> str:
    alone = sum(other.layer == layer.layer for other in by_layer) == 1
    return words("layer {layer}", layer=layer.layer) if alone else layer.site


def _print_pairs(table: HeadTable, console: Console, name: str, largest: bool, such: str, width: int) -> None:
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
    console.print(Text("\n" + words("Pairs that {do}", do=words(such)), style="bold"), width=width)
    number = {head: row for row, head in enumerate(head_names(table.rows))}
    for pair in pairs:
        cell = number[pair.one], number[pair.other]
        line = f"  {pair.one} {pair.other}  {pair.value:.3f}"
        if f"{name}_se" in table.matrices:
            line += f" ± {table.matrices[f'{name}_se'][cell]:.3f}"
        others = [
            f"{heading} {table.matrices[other][cell]:.2f}"
            for other, heading in (("js", "JS"), ("overlap", words("overlap")), ("cka", "CKA"),
                                   ("contribution_cosine", words("contribution")))
            if other in table.matrices and other != name
        ]  # fmt: skip
        console.print(Text(f"{line}   {', '.join(others)}".rstrip()), width=width)


def _print_groups(table: HeadTable, console: Console, width: int) -> None:
    cluster, names = table["cluster"].long().tolist(), head_names(table.rows)
    silhouette = table["silhouette"].mean().item()
    verdict = words("they are separate") if silhouette >= APART else words("they shade into each other")
    count = len(set(cluster))
    title = words(
        "Groups of heads that look alike: {count} (silhouette {silhouette:.2f}: {verdict})",
        count=count, silhouette=silhouette, verdict=verdict,
    )  # fmt: skip
    console.print(Text(f"\n{title}", style="bold"), width=width)
    for group in range(min(count, GROUPS)):
        heads = [name for name, its in zip(names, cluster, strict=True) if its == group]
        more = " " + words("and {count} more", count=len(heads) - NAMED) if len(heads) > NAMED else ""
        console.print(Text(f"  {len(heads):3d}  {' '.join(heads[:NAMED])}{more}"), width=width)
    off = stress(table.matrices["js"], torch.stack([table["x"], table["y"]], 1))
    console.print(Text(words("On the map, distances are off by {off:.0%}.", off=off)), width=width)


def _numbers(values: Iterable[float], digits: int = 2) -> list[str]:
    return [_number(value, digits) for value in values]


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
