"""Two models or texts side by side, for the terminal and as files: which heads moved, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.language import words
from manyheads.common.out_folder import writing
from manyheads.common.whole_files import write_whole
from manyheads.heads.comparison.compare import LEAST_CHANGE, Change, Comparison
from manyheads.heads.comparison.sides import Sides
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.document.assemble import About, document
from manyheads.view.figures.head_pictures import grid_picture
from manyheads.view.report import write_report
from manyheads.view.terminal.presentation import plain_text, print_notes, write_results

SHOWN = 15  # heads that moved most
GONE = "×"


@dataclass(frozen=True)
class ComparePresentation:
    """A comparison, what its sides are called, and the folder for its files."""

    compared: Comparison
    sides: Sides
    out: Path

    def show(self, console: Console) -> None:
        """How many heads are matched and how many moved; those that moved most, with their changes."""
        compared, (first, second) = self.compared, self.sides.names
        title = words("{first} and {second}, side by side", first=first, second=second)
        console.print(Text(title, "bold"), soft_wrap=True)
        for sentence in self._sentences():
            console.print(Text(sentence), soft_wrap=True)
        rows = compared.moved()
        if rows:
            console.print()
            console.print(self._table(rows[:SHOWN]))
        if len(rows) > SHOWN:
            console.print(Text(words("and {count} more: changes.csv", count=len(rows) - SHOWN), "dim"))
        doubts = [*doubts_in(compared.before).sentences(), *doubts_in(compared.after).sentences()]
        corpora = dict.fromkeys(note for corpus in self.sides.corpora for note in corpus.notes)
        print_notes([*dict.fromkeys(doubts), *corpora], console)

    def _sentences(self) -> list[str]:
        compared, (first, second) = self.compared, self.sides.names
        pairs, corpora = len(compared.pairs), [corpus.what for corpus in self.sides.corpora]
        if self.sides.loaded[0] is self.sides.loaded[1]:
            reading = words(
                "{model} on both: {first} texts and {second}",
                model=self.sides.loaded[0].name, first=compared.batches[0], second=compared.batches[1],
            )  # fmt: skip
        elif compared.paired:
            reading = words(
                "{count} texts of {corpus}, the same for both", count=compared.batches[0], corpus=corpora[0]
            )
        else:
            reading = words("{first} and {second}", first=corpora[0], second=corpora[1])
        sentences = [reading]
        lone = len(compared.before) - pairs, len(compared.after) - pairs
        if compared.match == "number":
            matched = words("{count} heads are matched by their numbers.", count=pairs)
        else:
            matched = words("{count} heads are matched by what they do.", count=pairs)
        for name, count in zip((first, second), lone, strict=True):
            if count:
                matched += " " + words("{count} of {name} have no counterpart.", count=count, name=name)
        sentences.append(matched)
        renumbered = sum(
            compared.before.rows[i].original_head != compared.after.rows[j].original_head
            or compared.before.rows[i].site != compared.after.rows[j].site
            for i, j in compared.pairs
        )
        if renumbered:
            sentences.append(
                words("{count} of them have another number in the other model.", count=renumbered)
            )
        tested = sum(word != "" for word in compared.changes["moved"])
        if not tested:
            sentences.append(words("One text gives no standard errors: no change is tested."))
        else:
            sentences.append(
                words(
                    "{moved} of {tested} moved: false discovery rate {rate:.0%}, changes above {least:.0%} "
                    "of the spread between heads.",
                    moved=len(compared.moved()), tested=tested, rate=compared.rate, least=LEAST_CHANGE,
                )
            )  # fmt: skip
        return sentences

    def _table(self, rows: list[int]) -> Table:
        compared, shown = self.compared, Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        has_attention = "attention" in compared.changes.sums
        shown.add_column(words("head"))
        shown.add_column(words("is now"))
        if has_attention:
            shown.add_column(words("attention moved"), justify="right")
        shown.add_column(words("what changed most"), overflow="fold")
        for row in rows:
            head = compared.changes.rows[row]
            name, other = f"{head.layer}.{head.head}", compared.changes["matched"][row]
            cells = [name, "=" if other == name else other]
            if has_attention:
                value, error = (compared.changes[column][row] for column in ("attention", "attention_se"))
                cells.append(f"{value:.3f} ± {error:.3f}")
            certain = [change for change in compared.of(row) if change.q < compared.rate]
            cells.append("; ".join(_phrase(change) for change in certain[:2]))
            shown.add_row(*cells)
        return shown

    def document(self) -> dict[str, object]:
        """A row for each pair of heads with its changes, and what has no counterpart."""
        compared = self.compared
        first, second = ({i for i, _ in compared.pairs}, {j for _, j in compared.pairs})
        heads = []
        for number, row in enumerate(compared.changes):
            q = {f"{name}_q": float(values[number]) for name, values in compared.q.items()}
            heads.append(row | q)
        return {
            "models": [each.name for each in self.sides.loaded],
            "corpora": [corpus.what for corpus in self.sides.corpora],
            "batches": list(compared.batches),
            "paired": compared.paired,
            "rate": compared.rate,
            "match": compared.match,
            "moved": len(compared.moved()),
            "without_counterpart": [
                [f"{row.layer}.{row.head}" for i, row in enumerate(table.rows) if i not in matched]
                for table, matched in ((compared.before, first), (compared.after, second))
            ],
            "out": str(self.out),
            "heads": heads,
        }

    def write(self) -> list[str]:
        """changes.json and .csv, compare.txt; heads.png, and report.html to explore them."""
        names = ("changes.json", "changes.csv")
        files = write_results(self.compared.changes, plain_text(self.show), self.out, names, "compare.txt")
        first, second = self.sides.names
        about = About(f"{first} → {second}", self.sides.corpora[0].what, notes=self._sentences())
        with writing(self.out):
            write_whole(self.out / "heads.png", self.picture())
            write_report(document(self.compared.changes, about=about), self.out / "report.html")
        return [
            words("Every change with its standard error: {file}", file=files[1]),
            words("All heads in one figure: {file}", file=self.out / "heads.png"),
            words("To see every head, open in a browser: {file}", file=self.out / "report.html"),
        ]

    def picture(self) -> bytes:
        """A PNG with a cell for each head of the first side: how far it moved, and where it is now."""
        compared, (first, second) = self.compared, self.sides.names
        values, marks = [math.nan] * len(compared.before), dict.fromkeys(range(len(compared.before)), GONE)
        for row, ((i, _), size) in enumerate(zip(compared.pairs, compared.size().tolist(), strict=True)):
            values[i] = size
            head, other = compared.before.rows[i], compared.changes["matched"][row]
            layer, _, number = other.partition(".")
            same_layer = layer == str(head.layer)
            marks[i] = "" if other == f"{head.layer}.{head.head}" else f"→{number if same_layer else other}"
            marks[i] += "*" if compared.changes["moved"][row] == "yes" else ""
        if "attention" in compared.changes.sums:
            measure = words("distance between what both attend to (0: the same, 1: nothing in common)")
        else:
            measure = words("largest change, in units of the spread between heads")
        note = words("* moved; → its number in the other; {gone} no counterpart", gone=GONE)
        return grid_picture(compared.before, values, f"{first} → {second}\n{measure}", marks=marks, note=note)


def _phrase(change: Change) -> str:
    """One change in a few words."""
    name = words(change.metric.replace("_", " "))
    return f"{name} {change.before:.3g} → {change.after:.3g} ({change.change:+.2g} ± {change.se:.1g})"
