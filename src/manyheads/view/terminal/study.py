"""Studies for the terminal: the list of claims, and the result of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.json_files import in_one_sentence
from manyheads.common.language import words
from manyheads.common.out_folder import writing
from manyheads.common.whole_files import write_whole
from manyheads.studies import NAMES, find
from manyheads.studies.drawing import as_png, as_svg
from manyheads.studies.result import Result, read_result, summary
from manyheads.studies.run import RESULT, recorded
from manyheads.studies.study import VERDICTS, Language, Verdict
from manyheads.view.gallery import page

COLOURS: Mapping[Verdict, str] = {
    "holds": "green",
    "holds in part": "yellow",
    "does not hold": "red",
    "cannot be told": "bright_black",
}

MOST_ROWS = 40  # that are printed


class Listed(TypedDict):
    """A claim in the list, and its last verdict, if it was ever run."""

    name: str
    claim: str
    verdict: Verdict | None
    size: str | None


def listed(out: Path, language: Language) -> list[Listed]:
    """All claims, with the verdict of the last run under ``out``, or of the one that is recorded."""
    claims: list[Listed] = []
    for name in NAMES:
        study, path = find(name), out / name / RESULT
        result = read_result(path) if path.exists() else recorded(name)
        verdict = None
        if result is not None and result.complete:
            with in_one_sentence(f"{path}: damaged, or not what study wrote; remove it"):
                verdict = study.verdict(result).verdict
        size = None if result is None else result.size
        claims.append(
            {"name": name, "claim": study.claim.sentence[language], "verdict": verdict, "size": size}
        )
    return claims


def print_list(claims: list[Listed], language: Language, console: Console) -> None:
    """A row for every claim."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in (words("study"), words("claim"), words("verdict")):
        table.add_column(title, overflow="fold")
    for row in claims:
        verdict = row["verdict"]
        judged = (
            Text(words("not run yet"))
            if verdict is None
            else Text(VERDICTS[verdict][language], COLOURS[verdict])
        )
        table.add_row(row["name"], Text(row["claim"]), judged)
    console.print(table)
    console.print(
        "\n" + words("Run one: {command}", command="manyheads study several_heads"), highlight=False
    )


@dataclass(frozen=True)
class StudyPresentation:
    """The result of a study, and the folder for its files."""

    result: Result
    language: Language
    out: Path

    def show(self, console: Console) -> None:
        """The claim, the numbers, the verdict and the rule that it follows from."""
        study, language = find(self.result.study), self.language
        console.print(Text(study.claim.sentence[language], style="bold"), soft_wrap=True)
        console.print()
        console.print(_numbers(self.result, language))
        if not self.result.complete:
            return
        judgement = study.verdict(self.result)
        verdict = Text(VERDICTS[judgement.verdict][language], style=f"bold {COLOURS[judgement.verdict]}")
        console.print(Text("\n") + verdict + Text(f". {judgement.because[language]}"), soft_wrap=True)
        console.print(Text(study.claim.rule[language], style="dim"), soft_wrap=True)

    def document(self) -> dict[str, object]:
        """The result, and its verdict."""
        study = find(self.result.study)
        document: dict[str, object] = {**self.result.document()}
        if self.result.complete:
            judgement = study.verdict(self.result)
            document |= {"verdict": judgement.verdict, "because": judgement.because[self.language]}
        return document | {"out": str(self.out)}

    def write(self) -> list[str]:
        """The figure as SVG and PNG, the rows as CSV, and a page; result.json is there already."""
        study = find(self.result.study)
        if not self.result.complete:
            return []
        figure = study.figure(self.result, self.language)
        files: dict[str, bytes | str] = {
            "figure.svg": as_svg(figure),
            "figure.png": as_png(figure),
            "rows.csv": self.result.to_csv(),
            "index.html": page([self.result], self.language),
        }
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write_whole(self.out / name, content)
        return [
            words("The page: {file}", file=self.out / "index.html"),
            words("Every number: {file}", file=self.out / "rows.csv"),
        ]


def _numbers(result: Result, language: Language) -> Table:
    """A row for every setting, with the mean and interval of every number."""
    columns = find(result.study).COLUMNS
    keys = [name for name in result.rows[0] if name not in columns and name != "seed"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in (
        *(name.replace("_", " ") for name in keys),
        *(title[language] for title in columns.values()),
    ):
        table.add_column(title, justify="right")
    rows = list(summary(result, list(columns)))
    for key, values in rows[:MOST_ROWS]:
        numbers = (f"{values[column]:.4g}" for column in columns)
        table.add_row(*(str(key.get(name, "")) for name in keys), *numbers)
    if len(rows) > MOST_ROWS:
        table.caption = words("and {count} more rows in rows.csv", count=len(rows) - MOST_ROWS)
    return table
