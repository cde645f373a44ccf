"""HeadTables on disk: JSON keeps everything, CSV and Parquet everything but profiles and matrices."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, TypeVar, get_type_hints

import torch

from manyheads.common.csv_cells import from_cell, to_cell
from manyheads.common.json_files import check_fields, in_one_sentence, read_bytes, read_json
from manyheads.common.json_numbers import plain
from manyheads.common.types import Json
from manyheads.common.whole_files import write_whole

if TYPE_CHECKING:
    from manyheads.heads.table import HeadTable

_FORMAT = "manyheads head table"
_VERSION = 1
_PARTS = ("count", "sum", "squares")
_KINDS = (".json", ".csv", ".parquet")
_LARGEST = 2_000_000_000  # bytes of a file
_MOST_CELLS = 100_000_000
_Cell = str | int | float
Table = TypeVar("Table")


class Row(NamedTuple):
    """Which head a row of a table is about."""

    site: str
    layer: int
    head: int
    original_head: int
    kv_head: int
    kind: str


class Contents(NamedTuple):
    """What a file holds: the arguments of `HeadTable`."""

    rows: list[Row]
    tokens: torch.Tensor
    sums: dict[str, torch.Tensor]
    model: str
    profiles: dict[str, dict[str, torch.Tensor]]
    labels: dict[str, list[str]]
    matrices: dict[str, torch.Tensor]


def save(table: HeadTable, path: str | PathLike[str]) -> None:
    """Write a table in the format of the file's suffix, atomically.

    >>> import tempfile
    >>> from manyheads.heads.table import HeadTable
    >>> table = HeadTable([Row("attn", 0, 0, 0, 0, "self")], torch.ones(1), {"entropy": torch.ones(3, 1)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(table, f"{folder}/heads.json")
    ...     load(f"{folder}/heads.json", HeadTable)
    HeadTable(1 heads at 1 sites, 1 tokens: entropy)
    """
    path = Path(path)
    kind = _kind(path)
    if kind != ".json" and (table.profiles or table.matrices):
        raise ValueError(f"{path.name}: profiles and matrices can only be kept in .json; save it as one")
    if kind == ".json":
        write_whole(path, json.dumps(_as_json(table), indent=1))
        return
    columns = _flat(table)
    if kind == ".csv":
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(map(to_cell, columns))
        writer.writerows(map(to_cell, row) for row in zip(*columns.values(), strict=True))
        write_whole(path, text.getvalue())
    else:
        pyarrow, parquet = _pyarrow()
        buffer = io.BytesIO()
        data = pyarrow.table(columns).replace_schema_metadata({"format": _FORMAT, "model": table.model})
        parquet.write_table(data, buffer)
        write_whole(path, buffer.getvalue())


def load(path: str | PathLike[str], make: Callable[..., Table]) -> Table:
    """Read a table that `save` wrote: ``make`` is called with its `Contents`.

    Raises a ValueError that names the file if it is none.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == ".json":
        document = read_json(path, _Document, "table", format=_FORMAT, version=_VERSION, largest=_LARGEST)
    else:
        content = read_bytes(path, "table", _LARGEST)
    with in_one_sentence(f"table: {path} is not a table that manyheads wrote, or a damaged one"):
        if kind == ".json":
            return make(*_from_json(document))
        return make(*_from_flat(_csv_columns(content) if kind == ".csv" else _parquet_columns(content)))


class _Sums(TypedDict):
    count: list[float | None]
    sum: list[float | None]
    squares: list[float | None]


class _Document(TypedDict):
    model: str
    rows: list[list[str | int | bool | None]]
    tokens: list[float | None]
    sums: dict[str, _Sums]
    profiles: dict[str, dict[str, list[list[list[float | None]]]]]
    labels: NotRequired[dict[str, list[str]]]
    matrices: NotRequired[dict[str, list[list[float | None]]]]


def _csv_columns(content: bytes) -> Mapping[str, Sequence[_Cell]]:
    try:
        rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
    except (csv.Error, UnicodeError) as error:
        raise ValueError(f"not CSV: {error}") from None
    names = [from_cell(name) for name in rows[0]] if rows else []
    if len(set(names)) < len(names):
        raise ValueError("two of its columns have the same name")
    return dict(zip(names, map(list, zip(*rows[1:], strict=True)), strict=True)) if rows[1:] else {}


def _parquet_columns(content: bytes) -> Mapping[str, Sequence[_Cell]]:
    pyarrow, parquet = _pyarrow()
    file = parquet.ParquetFile(pyarrow.BufferReader(content))
    if file.metadata.num_rows * max(file.metadata.num_columns, 1) > _MOST_CELLS:
        raise ValueError(f"it says that it has more than {_MOST_CELLS:,} cells")
    columns: dict[str, list[_Cell]] = file.read(use_threads=False).to_pydict()
    return columns


def _kind(path: Path) -> str:
    if path.suffix not in _KINDS:
        raise ValueError(f"{path.name}: expected a name that ends in {', '.join(_KINDS)}")
    return path.suffix


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError(
            "Parquet files need pyarrow: pip install pyarrow, or save to .json or .csv"
        ) from None
    return pyarrow, parquet


def _as_json(table: HeadTable) -> Json:
    profiles = {
        site: {name: value.tolist() for name, value in by_metric.items()}
        for site, by_metric in table.profiles.items()
    }
    sums = {name: dict(zip(_PARTS, value.tolist(), strict=True)) for name, value in table.sums.items()}
    document = {
        "format": _FORMAT, "version": _VERSION, "model": table.model, "columns": list(Row._fields),
        "rows": [list(row) for row in table.rows], "tokens": table.tokens.tolist(), "sums": sums,
        "profiles": profiles, "labels": table.labels,
        "matrices": {name: matrix.tolist() for name, matrix in table.matrices.items()},
    }  # fmt: skip
    numbers: Json = plain(document)
    return numbers


def _from_json(document: _Document) -> Contents:
    sums = {
        name: _numbers([parts["count"], parts["sum"], parts["squares"]])
        for name, parts in document["sums"].items()
    }
    profiles = {
        site: {name: _numbers(value) for name, value in by_metric.items()}
        for site, by_metric in document["profiles"].items()
    }
    rows = [_row(values) for values in document["rows"]]
    matrices = {name: _numbers(matrix) for name, matrix in document.get("matrices", {}).items()}
    labels = document.get("labels", {})
    return Contents(rows, _numbers(document["tokens"]), sums, document["model"], profiles, labels, matrices)


def _row(values: Sequence[Any]) -> Row:
    check_fields(dict(zip(Row._fields, values, strict=False)), get_type_hints(Row), "rows")
    return Row(*values)


def _numbers(value: object) -> torch.Tensor:
    def with_nan(item: object) -> object:
        return [with_nan(x) for x in item] if isinstance(item, list) else math.nan if item is None else item

    return torch.tensor(with_nan(value), dtype=torch.float64)


def _flat(table: HeadTable) -> dict[str, list[_Cell]]:
    """Columns for people first, then the sums that make merging exact, and the model on each row."""
    cells = {c: table[c] for c in table.columns}
    columns = {c: x.tolist() if isinstance(x, torch.Tensor) else x for c, x in cells.items()}
    for name in table.metrics:
        for part, values in zip(_PARTS, table.sums[name].tolist(), strict=True):
            columns[f"{name}_{part}"] = values
    return columns | {"model": [table.model] * len(table)}


def _from_flat(columns: Mapping[str, Sequence[_Cell]]) -> Contents:
    integers = {"layer", "head", "original_head", "kv_head"}
    if missing := [name for name in (*Row._fields, "tokens", "model") if name not in columns]:
        raise ValueError(f"it has no column {missing[0]!r}")
    keys = [[int(x) if c in integers else from_cell(str(x)) for x in columns[c]] for c in Row._fields]
    before = list(columns)[: list(columns).index("tokens")]
    labels = {c: [from_cell(str(x)) for x in columns[c]] for c in before if c not in Row._fields}
    names = [c.removesuffix("_squares") for c in columns if c.endswith("_squares")]
    sums = {name: [[float(x) for x in columns[f"{name}_{part}"]] for part in _PARTS] for name in names}
    tokens = [float(x) for x in columns["tokens"]]
    models = {from_cell(str(x)) for x in columns["model"]} or {""}
    if len(models) > 1:
        raise ValueError("its rows are of several models")
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    rows = [_row(key) for key in zip(*keys, strict=True)]
    counts = torch.tensor(tokens, dtype=torch.float64)
    return Contents(rows, counts, tensors, models.pop(), {}, labels, {})
