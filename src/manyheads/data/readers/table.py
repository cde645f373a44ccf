"""Tables from CSV and TSV files: rows with the numbers of their lines, and columns of numbers over time."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.common.csv_cells import from_cell
from manyheads.common.decompression import File
from manyheads.data.readers.text import read_text

_TIMES = frozenset({"date", "time", "datetime", "timestamp", "year", "month", "week", "day", "hour"})


class Row(NamedTuple):
    """A row of a table, with the number of its line in the file, from 1."""

    line: int
    cells: list[str]


_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
QUOTING = 'cells with commas, quotation marks or line breaks stand in quotation marks, as "so, ""so"""'
LONGEST_CELL = 10_000_000  # characters


def separated_rows(path: File, delimiter: str | None = "\t", quoted: bool = False) -> list[Row]:
    """Every row of a CSV or TSV file, as it is, with the number of the line that it begins at.

    Parameters
    ----------
    delimiter: between two cells. Default: a tab. None for the one of comma, semicolon and tab that the first
        line has most of.
    quoted: whether cells may be quoted, as in CSV; they may then hold line breaks.
    """
    text = read_text(path)
    if delimiter is None:
        delimiter = max(_DELIMITERS, key=text.partition("\n")[0].count)
    quoting: Any = {"strict": True} if quoted else {"quoting": csv.QUOTE_NONE}
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, **quoting)
    rows, start = [], 1
    limit = csv.field_size_limit(LONGEST_CELL)  # cells may be as long as documents are
    try:
        for cells in reader:
            rows.append(Row(start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        advice = f"; {QUOTING}" if quoted else ""
        raise ValueError(f"data: line {start} of {path} is not a row of a table ({error}){advice}") from None
    finally:
        csv.field_size_limit(limit)
    return rows


def read_rows(
    path: File, columns: int | None = None, *, delimiter: str | None = "\t", quoted: bool = False
) -> list[Row]:
    """The rows of a CSV or TSV file, of which each has the same number of cells; empty lines are left out.

    Parameters
    ----------
    path: the file, or one in an archive.
    columns: how many cells each row must have. Default: as many as the first row.
    delimiter, quoted: as for `separated_rows`; in TSV quotation marks are part of the text.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "t.tsv").write_text('one "1"\\teins\\n\\ntwo\\tzwei\\n')
    ...     read_rows(Path(folder, "t.tsv"))
    [Row(line=1, cells=['one "1"', 'eins']), Row(line=3, cells=['two', 'zwei'])]
    """
    every = separated_rows(path, delimiter, quoted)
    rows = [row for row in every if len(row.cells) > 1 or "".join(row.cells).strip()]
    expected = columns or (len(rows[0].cells) if rows else 0)
    for line, row in rows:
        if len(row) != expected:
            reason = "" if columns else ", as many as the first row"
            between = f", with {_DELIMITERS[delimiter]} between them" if delimiter else ""
            raise ValueError(
                f"data: line {line} of {path} has {len(row)} columns; expected {expected}{reason}{between}"
                f"{f'; {QUOTING}' if quoted else ''}"
            )
    return rows


def column_names(cells: Sequence[str], path: File) -> list[str]:
    """The names in the first line of a table, each once."""
    names = [name.strip() for name in cells]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"data: {path} has two columns called {twice[0]!r}; expected a name for each")
    return names


def read_named_rows(path: File, columns: Collection[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a .tsv file by the names in its first line, each with the number of its line.

    Parameters
    ----------
    path: the file, or one in an archive.
    columns: names that must be there; others may.
    """
    rows = read_rows(path)
    names = column_names(rows[0].cells, path) if rows else []
    if missing := [name for name in columns if name not in names]:
        there = ", ".join(names) or "none"
        raise ValueError(f"data: {path} has no column {missing[0]!r} in its first line; it has {there}")
    return [
        (line, {name: cell.strip() for name, cell in zip(names, cells, strict=True)})
        for line, cells in rows[1:]
    ]


@dataclass
class Table:
    """Numbers over time.

    Attributes
    ----------
    columns: their names.
    values: (rows, columns) in float64.
    uneven: the number of steps from row to row that are not as long as most.
    """

    columns: list[str]
    values: Tensor
    uneven: int = 0


def read_table(path: Path, time: str | None = None, columns: str | None = None) -> Table:
    """A CSV file with a line of names, a column of times, and columns of numbers.

    Parameters
    ----------
    path: the file; its cells are separated by commas, semicolons or tabs.
    time: the name of the column of times. Default: the first that is called date, time, year or similar, or
        else the first column if it holds no numbers. "none" for a table without one.
    columns: names of the columns to read, separated by commas. Default: all but the times.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "t.csv").write_text("date,a,b\\n2020-01-01,1,2\\n2020-01-02,3,4\\n")
    ...     table = read_table(Path(folder, "t.csv"), columns="b")
    >>> table.columns, table.values.tolist()
    (['b'], [[2.0], [4.0]])
    """
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}; expected a CSV file with a line of names")
    rows = read_rows(path, delimiter=None, quoted=True)
    if len(rows) < 2:
        raise ValueError(f"data: {path} has no row of numbers; expected a line of names and rows under it")
    names = [from_cell(name) for name in column_names(rows[0].cells, path)]
    times = _time_column(names, rows[1].cells, time, path)
    chosen = _chosen_columns(names, times, columns, path)
    values = [[_number(cells[i], line, names[i], path) for i in chosen] for line, cells in rows[1:]]
    uneven = 0 if times is None else _steps([(line, cells[times].strip()) for line, cells in rows[1:]], path)
    return Table([names[i] for i in chosen], torch.tensor(values, dtype=torch.float64), uneven)


def _time_column(names: list[str], first: list[str], time: str | None, path: Path) -> int | None:
    if time == "none":
        return None
    if time is not None:
        if time not in names:
            raise ValueError(f"time: {path} has no column {time!r}; it has {', '.join(names)}")
        return names.index(time)
    time_columns = [i for i, name in enumerate(names) if name.lower() in _TIMES]
    if time_columns or _float(first[0]) is None:
        return time_columns[0] if time_columns else 0
    raise ValueError(
        f"time: which column of {path} has the times? Expected one of {', '.join(names)}, or none"
    )


def _chosen_columns(names: list[str], time: int | None, columns: str | None, path: Path) -> list[int]:
    if columns is None:
        others = [i for i in range(len(names)) if i != time]
        if not others:
            raise ValueError(f"data: {path} has a column of times and no other; expected numbers, too")
        return others
    chosen = [name.strip() for name in columns.split(",")]
    if missing := [name for name in chosen if name not in names]:
        raise ValueError(f"columns: {path} has no column {missing[0]!r}; it has {', '.join(names)}")
    return [names.index(name) for name in chosen]


def _float(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(cell: str, line: int, name: str, path: Path) -> float:
    value = _float(cell)
    if value is None:
        content = repr(cell) if cell.strip() else "nothing"
        raise ValueError(
            f"data: line {line} of {path} has {content} in the column {name!r}; expected a number: fill it "
            "in, leave the row out, or choose --columns"
        )
    return value


def _steps(times: list[tuple[int, str]], path: Path) -> int:
    """Check that times increase, if they can be read, and count the steps that are not as long as most."""
    moments: list[float] = []
    for _, cell in times:
        value = _float(cell)
        if value is None:
            try:
                moment = datetime.fromisoformat(cell)
                epoch = datetime(1970, 1, 1, tzinfo=UTC if moment.tzinfo else None)
                value = (moment - epoch).total_seconds()
            except (ValueError, OverflowError):
                return 0  # some other way to write it: the order of rows has to do
        moments.append(value)
    steps = [after - before for before, after in pairwise(moments)]
    for (line, cell), step in zip(times[1:], steps, strict=True):
        if step <= 0:
            raise ValueError(
                f"data: line {line} of {path}, {cell}, is not later than the line before it; expected rows "
                "in the order of time, each once"
            )
    return len(steps) - Counter(steps).most_common(1)[0][1] if steps else 0
