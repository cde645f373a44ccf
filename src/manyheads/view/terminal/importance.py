"""Importance for the terminal: the heads at both ends of a ranking, and how far methods agree."""

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
from manyheads.data.batches import Corpus, CorpusSummary
from manyheads.heads.diversity.result import head_names
from manyheads.heads.importance.method_comparison import MANY_PASSES, MethodComparison
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.terminal.presentation import MeasuredPresentation, plain_text, print_notes

SHOWN = 8  # heads from each end of the ranking


@dataclass(frozen=True)
class ImportancePresentation(MeasuredPresentation):
    """The rankings of a model's heads on a corpus, and the folder for their files."""

    comparison: MethodComparison
    model: str
    corpus: Corpus | CorpusSummary
    out: Path

    @property
    def reading(self) -> str:
        """What was read, and how."""
        corpus = self.corpus
        return words(
            "{corpus}: {total:,} {unit}, up to {tokens:,} tokens at once",
            corpus=words(corpus.what), total=corpus.total(), unit=words(corpus.unit),
            tokens=corpus.batch_tokens,
        )  # fmt: skip

    def show(self, console: Console) -> None:
        """The heads at both ends of the first method's ranking, with all numbers; then the agreement."""
        tables = self.comparison.tables
        first, *_ = tables.values()
        title = words(
            "{model} on {corpus}, {heads} heads", model=self.model, corpus=self.reading, heads=len(first)
        )
        console.print(Text(title, "bold"), soft_wrap=True)
        for name, table in tables.items():
            time = words("{seconds:.1f} s", seconds=self.comparison.seconds[name])
            console.print(Text(f"{name}: {words(table['measure'][0])}; {time}"), soft_wrap=True)
        console.print()
        console.print(_both_ends(tables))
        for pair in self.comparison.agreements:
            sentence = words(
                "{first} and {second}: Spearman {spearman:.2f}, 95% interval {low:.2f} to {high:.2f}, over "
                "{heads} heads",
                **pair._asdict(),
            )
            console.print(Text(sentence), soft_wrap=True)
        print_notes([*doubts_in(first).sentences(), *self.corpus.notes], console)

    def document(self) -> dict[str, object]:
        """A row for each head with the numbers of all methods."""
        tables, seconds = self.comparison.tables, self.comparison.seconds
        first, *_ = tables.values()
        heads: list[dict[str, object]] = [dict(row._asdict()) for row in first.rows]
        for name, table in tables.items():
            for column, key in (("importance", name), ("importance_se", f"{name}_se")):
                for head, value in zip(heads, table[column].tolist(), strict=True):
                    head[key] = value
        return {
            "model": self.model,
            "fingerprint": first.model,
            "corpus": self.reading,
            "notes": self.corpus.notes,
            "measures": {name: table["measure"][0] for name, table in tables.items()},
            "seconds": {name: round(seconds[name], 3) for name in tables},
            "stopped": self.comparison.stopped or None,
            **doubts_in(first).as_json(),
            "agreement": [pair._asdict() for pair in self.comparison.agreements],
            "out": str(self.out),
            "heads": heads,
        }

    def write(self) -> list[str]:
        """A table for each method, to load and to plan cuts by, and the summary."""
        files = []
        with writing(self.out):
            for name, table in self.comparison.tables.items():
                for kind in ("json", "csv"):
                    files.append(self.out / f"{name}.{kind}")
                    table.save(files[-1])
            files.append(self.out / "importance.txt")
            write_whole(files[-1], plain_text(self.show))
        return [words("Written: {files}", files=", ".join(map(str, files)))]

    @property
    def empty(self) -> bool:
        """Whether no method came to an end."""
        return not self.comparison.tables

    def ending(self, interrupted: bool) -> str | None:
        """The sentence for a comparison that Ctrl-C ended; raises the error that ended one."""
        comparison, method = self.comparison, self.comparison.stopped
        if comparison.error is not None:
            saved = f"; what was computed before is in {self.out}" if comparison.tables else ""
            raise ValueError(f"{comparison.error}{saved}") from comparison.error
        if not method:
            return None
        if method in comparison.tables and method not in MANY_PASSES:
            return words(
                "Stopped during {method}: its numbers are those of the batches that were read until then.",
                method=method,
            )
        if comparison.resumable:
            return words("Stopped during {method}; the same command continues from there.", method=method)
        return words("Stopped during {method}.", method=method)


def _both_ends(tables: dict[str, HeadTable]) -> Table:
    """The heads at both ends of the first ranking, with the number and the rank of each method."""
    first, *_ = tables.values()
    names = head_names(first.rows)
    order: list[int | None] = [*_order(first)]
    ranks = {name: {row: rank for rank, row in enumerate(_order(table), 1)} for name, table in tables.items()}
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(words("layer.head"))
    for name in tables:
        shown.add_column(name, justify="right")
        shown.add_column(words("rank"), justify="right")
    for row in order if len(order) <= 2 * SHOWN else [*order[:SHOWN], None, *order[-SHOWN:]]:
        if row is None:
            shown.add_row("...")
            continue
        cells = []
        for name, table in tables.items():
            cells += [_with_error(table, row), str(ranks[name][row])]
        shown.add_row(names[row], *cells)
    return shown


def _order(table: HeadTable) -> list[int]:
    """The rows of a table, the most important head first."""
    order: list[int] = (
        table["importance"].nan_to_num(-math.inf).argsort(descending=True, stable=True).tolist()
    )
    return order


def _with_error(table: HeadTable, row: int) -> str:
    value, error = table["importance"][row].item(), table["importance_se"][row].item()
    return f"{value:.3g}" + (f" ± {error:.1g}" if math.isfinite(error) else " ± ?")
