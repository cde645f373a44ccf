"""Tables of numbers over time, from CSV files: every cell checked, mistakes told by line and column."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from manyheads.common.csv_cells import from_cell
from manyheads.common.json_files import in_one_sentence
from manyheads.data.readers import text as texts

_TIMES = frozenset({"date", "time", "datetime", "timestamp", "year", "month", "week", "day", "hour"})
_MARKS = ",;\t"


@dataclass
class Table:
    """Numbers over time.

    Attributes
    ----------
    columns: what they are called.
    values: (rows, columns) in float64.
    uneven: how many steps from row to row are not as long as most.
    """

    columns: list[str]
    values: Tensor
    uneven: int = 0


def read_table(path: Path, time: str | None = None, columns: str | None = None) -> Table:
    """A CSV file with a line of names, a column that says when, and columns of numbers.

    Parameters
    ----------
    path: the file; its cells are parted by commas, semicolons or tabs.
    time: the name of the column that says when. Without, the first that is called date, time, year or the
        like, or else the first column if it holds no numbers. "none" for a table that has none.
    columns: names of those to read, with commas between them; all but the time without.

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
    text = texts.read_text(path)
    head = text.partition("\n")[0]
    mark = max(_MARKS, key=head.count)
    with in_one_sentence(f"data: {path} is no CSV that can be read"):
        lines = csv.reader(text.splitlines(), delimiter=mark)
        rows = [(number, row) for number, row in enumerate(lines, 1) if row]
    if len(rows) < 2:
        raise ValueError(f"data: {path} has no row of numbers; expected a line of names and rows under it")
    names = [from_cell(name.strip()) for name in rows[0][1]]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"data: {path} has two columns called {twice[0]!r}; expected a name for each")
    for number, row in rows:
        if len(row) != len(names):
            raise ValueError(
                f"data: line {number} of {path} has {len(row)} cells; expected {len(names)}, as many as names"
            )
    place = _time(names, rows[1][1], time, path)
    wanted = _wanted(names, place, columns, path)
    values = [[_number(row[i], number, names[i], path) for i in wanted] for number, row in rows[1:]]
    uneven = 0 if place is None else _steps([(n, row[place].strip()) for n, row in rows[1:]], path)
    return Table([names[i] for i in wanted], torch.tensor(values, dtype=torch.float64), uneven)


def _time(names: list[str], first: list[str], time: str | None, path: Path) -> int | None:
    if time == "none":
        return None
    if time is not None:
        if time not in names:
            raise ValueError(f"time: {path} has no column {time!r}; it has {', '.join(names)}")
        return names.index(time)
    called = [i for i, name in enumerate(names) if name.lower() in _TIMES]
    if called or _float(first[0]) is None:
        return called[0] if called else 0
    raise ValueError(
        f"time: which column of {path} says when? Expected one of {', '.join(names)}, or none if none does"
    )


def _wanted(names: list[str], time: int | None, columns: str | None, path: Path) -> list[int]:
    if columns is None:
        found = [i for i in range(len(names)) if i != time]
        if not found:
            raise ValueError(f"data: {path} has a column for the time and no other; expected numbers, too")
        return found
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
        what = f"has {cell!r}" if cell.strip() else "has nothing"
        raise ValueError(
            f"data: line {line} of {path} {what} in the column {name!r}; expected a number: fill it in, "
            "leave the row out, or choose --columns"
        )
    return value


def _steps(times: list[tuple[int, str]], path: Path) -> int:
    """See that time goes on, where it can be read, and count the steps that are not as long as most."""
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
