"""HeadTables on disk: JSON keeps everything, CSV and Parquet everything but the profiles."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from manyheads.heads.table import HeadTable, Row

_FORMAT = "manyheads head table"
_VERSION = 1
_PARTS = ("count", "sum", "squares")
_KINDS = (".json", ".csv", ".parquet")


def save(table: HeadTable, path: str | PathLike[str]) -> None:
    """Write a table; the file's ending says how. A file is there whole or not at all.

    >>> import tempfile
    >>> table = HeadTable([Row("attn", 0, 0, 0, 0, "self")], torch.ones(1), {"entropy": torch.ones(3, 1)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(table, f"{folder}/heads.json")
    ...     load(f"{folder}/heads.json")
    HeadTable(1 heads at 1 sites, 1 tokens: entropy)
    """
    path = Path(path)
    kind = _kind(path)
    if kind != ".json" and (table.profiles or table.matrices):
        raise ValueError(f"{path.name}: profiles and matrices can only be kept in .json; save it as one")
    if kind == ".json":
        _write(path, json.dumps(_as_json(table), indent=1).encode())
        return
    columns = _flat(table)
    if kind == ".csv":
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        _write(path, text.getvalue().encode())
    else:
        pyarrow, parquet = _pyarrow()
        buffer = io.BytesIO()
        data = pyarrow.table(columns).replace_schema_metadata({"format": _FORMAT, "model": table.model})
        parquet.write_table(data, buffer)
        _write(path, buffer.getvalue())


def load(path: str | PathLike[str]) -> HeadTable:
    """Read a table that `save` wrote. Raises a ValueError that names the file when it is no such thing."""
    path = Path(path)
    kind = _kind(path)
    try:
        if kind == ".json":
            return _from_json(json.loads(path.read_bytes()))
        if kind == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))
            return _from_flat({name: list(column) for name, *column in zip(*rows, strict=True)})
        _, parquet = _pyarrow()
        return _from_flat(parquet.read_table(path).to_pydict())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path}: not a table that manyheads wrote, or a damaged one ({error})") from error


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a text file, whole or not at all."""
    _write(Path(path), text.encode())


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


def _write(path: Path, content: bytes) -> None:
    """Write beside the file first, then move over it: a full disk or Ctrl-C leaves no half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # not the file beside it
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _as_json(table: HeadTable) -> dict[str, Any]:
    profiles = {
        site: {name: value.tolist() for name, value in found.items()}
        for site, found in table.profiles.items()
    }
    sums = {name: dict(zip(_PARTS, value.tolist(), strict=True)) for name, value in table.sums.items()}
    document = {
        "format": _FORMAT, "version": _VERSION, "model": table.model, "columns": list(Row._fields),
        "rows": [list(row) for row in table.rows], "tokens": table.tokens.tolist(), "sums": sums,
        "profiles": profiles, "labels": table.labels,
        "matrices": {name: matrix.tolist() for name, matrix in table.matrices.items()},
    }  # fmt: skip
    plain: dict[str, Any] = _finite(document)
    return plain


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(document: Any) -> HeadTable:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError("it does not say so")
    if document["version"] > _VERSION:
        raise ValueError(
            f"written by a newer manyheads: version {document['version']}, this one reads {_VERSION}"
        )
    sums = {name: _numbers([parts[part] for part in _PARTS]) for name, parts in document["sums"].items()}
    profiles = {
        site: {name: _numbers(value) for name, value in found.items()}
        for site, found in document["profiles"].items()
    }
    rows = [Row(*row) for row in document["rows"]]
    matrices = {name: _numbers(matrix) for name, matrix in document.get("matrices", {}).items()}
    labels = document.get("labels", {})
    return HeadTable(rows, _numbers(document["tokens"]), sums, document["model"], profiles, labels, matrices)


def _numbers(value: Any) -> torch.Tensor:
    def known(item: Any) -> Any:
        return [known(x) for x in item] if isinstance(item, list) else math.nan if item is None else item

    return torch.tensor(known(value), dtype=torch.float64)


def _flat(table: HeadTable) -> dict[str, list[Any]]:
    """Columns for people first, then the sums that make merging exact, and the model on each row."""
    known = {c: table[c] for c in table.columns}
    columns = {c: x.tolist() if isinstance(x, torch.Tensor) else x for c, x in known.items()}
    for name in table.metrics:
        for part, values in zip(_PARTS, table.sums[name].tolist(), strict=True):
            columns[f"{name}_{part}"] = values
    return columns | {"model": [table.model] * len(table)}


def _from_flat(columns: dict[str, list[Any]]) -> HeadTable:
    whole = {"layer", "head", "original_head", "kv_head"}
    keys = [[int(x) if c in whole else str(x) for x in columns[c]] for c in Row._fields]
    before = list(columns)[: list(columns).index("tokens")]
    labels = {c: [str(x) for x in columns[c]] for c in before if c not in Row._fields}
    names = [c.removesuffix("_squares") for c in columns if c.endswith("_squares")]
    sums = {name: [[float(x) for x in columns[f"{name}_{part}"]] for part in _PARTS] for name in names}
    tokens = [float(x) for x in columns["tokens"]]
    models = set(columns["model"]) or {""}
    if len(models) > 1:
        raise ValueError("its rows are of several models")
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    rows = [Row(*key) for key in zip(*keys, strict=True)]
    counts = torch.tensor(tokens, dtype=torch.float64)
    return HeadTable(rows, counts, tensors, str(models.pop()), labels=labels)
