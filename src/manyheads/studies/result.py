"""The result of a study: rows of numbers, what they were measured with, and their file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TypedDict

from manyheads.common.csv_cells import to_cell
from manyheads.common.intervals import Interval, interval, paired_difference
from manyheads.common.json_files import read_json
from manyheads.common.json_numbers import plain
from manyheads.common.whole_files import write_whole
from manyheads.studies.study import Row, Value

FORMAT, VERSION = "manyheads study", 1


class Document(TypedDict):
    """The file of a result."""

    format: str
    version: int
    study: str
    size: str
    settings: dict[str, object]
    code: str
    machine: str
    seconds: float
    complete: bool
    rows: list[dict[str, object]]


@dataclass
class Result:
    """What was measured.

    Parameters
    ----------
    study: its name.
    size: tiny, quick or full.
    settings: what it was run with.
    rows: one for each measurement. A column ``seed`` says which repetition it is.
    code: a digest of the study's source: rows of another version are not mixed with these.
    machine: processor, threads and versions.
    seconds: how long all parts took together.
    complete: whether all parts were run.

    Examples
    --------
    >>> settings = [(heads, seed) for heads in (1, 2) for seed in (0, 1)]
    >>> rows = [{"heads": heads, "seed": seed, "loss": 3.0 - heads + seed} for heads, seed in settings]
    >>> result = Result("several_heads", "quick", {}, rows)
    >>> result.values("loss", heads=2)
    {0: 1.0, 1: 2.0}
    >>> f"{result.difference('loss', {'heads': 1}, {'heads': 2}):.1f}"
    '1.0 ± 0.0'
    """

    study: str
    size: str
    settings: Mapping[str, object]
    rows: list[Row] = field(default_factory=list)
    code: str = ""
    machine: str = ""
    seconds: float = 0.0
    complete: bool = False

    def where(self, **key: Value) -> list[Row]:
        """The rows that have these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def values(self, column: str, **key: Value) -> dict[int, float]:
        """A column by seed, in the rows that have these values; raises where a seed has several."""
        values: dict[int, float] = {}
        for row in self.where(**key):
            seed, value = int(row.get("seed") or 0), row.get(column)
            if seed in values:
                raise ValueError(f"rows: several have {key} and seed {seed}; expected one")
            if isinstance(value, int | float):
                values[seed] = float(value)
        return values

    def interval(self, column: str, **key: Value) -> Interval:
        """The mean of a column over seeds, with its interval."""
        return interval(self.values(column, **key).values())

    def difference(self, column: str, first: Mapping[str, Value], second: Mapping[str, Value]) -> Interval:
        """A column at one setting minus that at another, paired by seed."""
        return paired_difference(self.values(column, **first), self.values(column, **second))

    def distinct(self, column: str) -> list[Value]:
        """The values of a column, in the order of the rows."""
        return list(dict.fromkeys(row[column] for row in self.rows if column in row))

    def document(self) -> Document:
        """Plain data, for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "study": self.study,
            "size": self.size,
            "settings": plain(dict(self.settings)),
            "code": self.code,
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "complete": self.complete,
            "rows": plain(self.rows),
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write a JSON file, completely or not at all; one row a line."""
        document = self.document()
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in document.pop("rows"))  # type: ignore[misc]
        text = json.dumps(document, ensure_ascii=False, indent=1)[:-2]
        write_whole(path, f'{text},\n "rows": [\n  {rows}\n ]\n}}\n')

    def to_csv(self) -> str:
        """The rows as a CSV text."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([to_cell(row.get(name)) for name in columns] for row in self.rows)
        return text.getvalue()


def read_result(path: str | PathLike[str]) -> Result:
    """The result in a file that `Result.save` wrote."""
    document = read_json(path, Document, "result", format=FORMAT, version=VERSION)
    rows: list[Row] = []
    for number, row in enumerate(document["rows"]):
        for name, value in row.items():
            if not isinstance(value, float | int | str | bool | None):
                raise ValueError(
                    f"result: {Path(path)} is damaged: rows[{number}].{name} is not a plain value"
                )
        rows.append(row)  # type: ignore[arg-type]
    return Result(
        document["study"], document["size"], document["settings"], rows, document["code"],
        document["machine"], document["seconds"], document["complete"],
    )  # fmt: skip


def summary(result: Result, columns: Sequence[str]) -> Iterator[tuple[Row, dict[str, Interval]]]:
    """Every setting, which is all that is no measured column and no seed, with the intervals of the columns.

    >>> rows = [{"heads": 1, "seed": seed, "loss": 2.0} for seed in (0, 1)]
    >>> [(key, f"{values['loss']:.1f}") for key, values in summary(Result("", "", {}, rows), ["loss"])]
    [({'heads': 1}, '2.0 ± 0.0')]
    """
    groups: dict[tuple[tuple[str, Value], ...], list[Row]] = {}
    for row in result.rows:
        key = tuple((name, value) for name, value in row.items() if name not in columns and name != "seed")
        groups.setdefault(key, []).append(row)
    for key, rows in groups.items():
        numbers = {
            column: [float(value) for row in rows if isinstance(value := row.get(column), int | float)]
            for column in columns
        }
        yield dict(key), {column: interval(values) for column, values in numbers.items()}
