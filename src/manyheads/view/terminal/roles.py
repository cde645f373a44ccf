"""Roles for the terminal: which heads have which role, the strongest first, and what was not judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.data.batches import Corpus
from manyheads.heads.diversity.result import head_names
from manyheads.heads.roles.role import ROLES
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.terminal.presentation import plain_text, print_notes, write_results

NAMED = 8  # heads named for a role


@dataclass(frozen=True)
class RolesPresentation:
    """The roles of a model's heads on a corpus, and the folder for their files."""

    table: HeadTable
    model: str
    corpus: Corpus
    out: Path

    def show(self, console: Console) -> None:
        """Which heads have which role, the strongest first; then what was not judged."""
        table = self.table
        title = f"{self.model} on {self.corpus.what}: {len(table)} heads"
        console.print(Text(title, style="bold"), soft_wrap=True)
        claims = claimed(table)
        console.print()
        console.print(_claims(table, claims) if claims else "No head has a role that can be claimed.")
        without = sum(not words for words in table["roles"])
        console.print(Text(f"\n{without} of {len(table)} heads have none of these roles."))
        for name in dict.fromkeys(column.partition(":")[0] for column, _ in claims.values()):
            about = f"  {name}: {ROLES[name].says} Baseline: {ROLES[name].against}."
            console.print(Text(about), soft_wrap=True)
        print_notes([*doubts_in(table).sentences(), *self.corpus.notes], console)
        reasons = dict.fromkeys(note for words in table["not_judged"] for note in words.split("; ") if note)
        if reasons:
            console.print(Text("\nNot judged:"))
        for reason in reasons:
            console.print(Text(f"  {reason}"), soft_wrap=True)

    def document(self) -> dict[str, object]:
        """One row for each head, with the number of cases behind each score."""
        sums = self.table.sums
        counts = {name: sums[name][0].tolist() for name in sums if name.endswith("_score")}
        heads = [
            row
            | {f"{name.removesuffix('_score')}_count": int(count[number]) for name, count in counts.items()}
            for number, row in enumerate(self.table)
        ]
        return {
            "model": self.model,
            "fingerprint": self.table.model,
            "corpus": self.corpus.what,
            "unknown": self.corpus.unknown,
            **doubts_in(self.table).as_json(),
            "out": str(self.out),
            "heads": heads,
        }

    def write(self) -> list[str]:
        """roles.json, roles.csv, roles.txt."""
        names = ("roles.json", "roles.csv")
        files = write_results(self.table, plain_text(self.show), self.out, names, "roles.txt")
        return [f"Every score with its baseline and count: {files[1]}", f"To load in Python: {files[0]}"]


def claimed(table: HeadTable) -> dict[str, tuple[str, list[int]]]:
    """For each role that some head has: the column it was judged by, and the rows, the strongest first."""
    claims: dict[str, tuple[str, list[int]]] = {}
    for column in (name.removesuffix("_score") for name in table.sums if name.endswith("_score")):
        name, _, variant = column.partition(":")
        for label in ROLES[name].claims if name in ROLES else ():
            label = label.format(variant=variant)
            heads = [row for row, words in enumerate(table["roles"]) if label in words.split(", ")]
            if heads:
                gain = (table[f"{column}_score"] - table[f"{column}_baseline"]).abs().tolist()
                claims[label] = column, sorted(heads, key=lambda row: -gain[row])
    return claims


def _claims(table: HeadTable, claims: dict[str, tuple[str, list[int]]]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("role")
    shown.add_column("heads", justify="right")
    shown.add_column("the strongest, as layer.head score", overflow="fold")
    shown.add_column("baseline", justify="right")
    shown.add_column("cases", justify="right")
    names = head_names(table.rows)
    for label, (column, heads) in claims.items():
        score, baseline = table[f"{column}_score"], table[f"{column}_baseline"]
        best = ", ".join(f"{names[row]} {score[row]:.2f}" for row in heads[:NAMED])
        more = f", and {len(heads) - NAMED} more" if len(heads) > NAMED else ""
        cases = int(table.sums[f"{column}_score"][0][heads[0]])
        shown.add_row(label, str(len(heads)), Text(best + more), f"{baseline[heads[0]]:.2f}", f"{cases:,}")
    return shown
