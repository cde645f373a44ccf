"""Roles for the terminal: which heads have which role, the strongest first, and what was not judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.language import words
from manyheads.data.batches import Corpus, CorpusSummary
from manyheads.heads.diversity.result import head_names
from manyheads.heads.roles.role import ROLES
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.terminal.presentation import (
    MeasuredPresentation,
    plain_text,
    print_notes,
    write_results,
)

NAMED = 8  # heads named for a role


@dataclass(frozen=True)
class RolesPresentation(MeasuredPresentation):
    """The roles of a model's heads on a corpus, and the folder for their files."""

    table: HeadTable
    model: str
    corpus: Corpus | CorpusSummary
    out: Path

    def show(self, console: Console) -> None:
        """Which heads have which role, the strongest first; then what was not judged."""
        table = self.table
        title = words(
            "{model} on {corpus}: {heads} heads",
            model=self.model, corpus=words(self.corpus.what), heads=len(table),
        )  # fmt: skip
        console.print(Text(title, style="bold"), soft_wrap=True)
        claims = claimed(table)
        console.print()
        console.print(_claims(table, claims) if claims else words("No head has a role that can be claimed."))
        without = sum(not label for label in table["roles"])
        console.print(
            Text(
                "\n"
                + words("{count} of {heads} heads have none of these roles.", count=without, heads=len(table))
            )
        )
        for name in dict.fromkeys(column.partition(":")[0] for column, _ in claims.values()):
            about = words(
                "{role}: {says} Baseline: {baseline}.",
                role=words(name), says=words(ROLES[name].says), baseline=words(ROLES[name].against),
            )  # fmt: skip
            console.print(Text(f"  {about}"), soft_wrap=True)
        print_notes([*doubts_in(table).sentences(), *self.corpus.notes], console)
        reasons = dict.fromkeys(note for text in table["not_judged"] for note in text.split("; ") if note)
        if reasons:
            console.print(Text("\n" + words("Not judged:")))
        for reason in reasons:
            console.print(Text(f"  {_reason(reason)}"), soft_wrap=True)

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
        return [
            words("Every score with its baseline and count: {file}", file=files[1]),
            words("To load in Python: {file}", file=files[0]),
        ]

    def ending(self, interrupted: bool) -> str | None:
        """The sentence for a search that Ctrl-C ended."""
        return words("Stopped: the roles are judged on what was read until then.") if interrupted else None


def _reason(text: str) -> str:
    """Why some roles were not judged, "copying, induction: why", in the language of the user."""
    roles, _, why = text.partition(": ")
    return f"{', '.join(map(words, roles.split(', ')))}: {words(why)}" if why else words(text)


def claimed(table: HeadTable) -> dict[str, tuple[str, list[int]]]:
    """For each role that some head has: the column it was judged by, and the rows, the strongest first."""
    claims: dict[str, tuple[str, list[int]]] = {}
    for column in (name.removesuffix("_score") for name in table.sums if name.endswith("_score")):
        name, _, variant = column.partition(":")
        for label in ROLES[name].claims if name in ROLES else ():
            label = label.format(variant=variant)
            heads = [row for row, labels in enumerate(table["roles"]) if label in labels.split(", ")]
            if heads:
                gain = (table[f"{column}_score"] - table[f"{column}_baseline"]).abs().tolist()
                claims[label] = column, sorted(heads, key=lambda row: -gain[row])
    return claims


def _claims(table: HeadTable, claims: dict[str, tuple[str, list[int]]]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(words("role"))
    shown.add_column(words("heads"), justify="right")
    shown.add_column(words("the strongest, as layer.head score"), overflow="fold")
    shown.add_column(words("baseline"), justify="right")
    shown.add_column(words("cases"), justify="right")
    names = head_names(table.rows)
    for label, (column, heads) in claims.items():
        score, baseline = table[f"{column}_score"], table[f"{column}_baseline"]
        best = ", ".join(f"{names[row]} {score[row]:.2f}" for row in heads[:NAMED])
        more = ", " + words("and {count} more", count=len(heads) - NAMED) if len(heads) > NAMED else ""
        cases = int(table.sums[f"{column}_score"][0][heads[0]])
        shown.add_row(
            words(label), str(len(heads)), Text(best + more), f"{baseline[heads[0]]:.2f}", f"{cases:,}"
        )
    return shown
