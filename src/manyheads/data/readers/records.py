"""Rows with named columns: CSV, TSV, JSON lines, Parquet, folders of classes, datasets."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyheads.common.errors import describe_error, first_line
from manyheads.common.json_files import in_one_sentence, parse_json, read_bytes
from manyheads.data.examples import spread
from manyheads.data.readers.table import QUOTING, column_names, separated_rows
from manyheads.data.readers.text import read_text

if TYPE_CHECKING:
    import pyarrow

EXPECTED = (
    "a .csv, .tsv, .jsonl or .parquet file, a folder with one folder for each class, or the name of a dataset"
)
# Splits that are read by default, the first that is there: the test split of a contest often has no labels.
SPLITS = ("validation", "test", "train")
SOUNDS = frozenset({".wav", ".flac", ".ogg", ".mp3", ".aiff"})
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
HUB_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?(:[\w.-]+)?")
_SUFFIXES = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet"})


class Record(NamedTuple):
    """A row, and where it is, for messages: "line 7"."""

    where: str
    values: Mapping[str, Any]


@dataclass
class Records:
    """The rows of a table.

    Attributes
    ----------
    what: its name, for people.
    columns: their names, in order; ``a.b`` for the part b of a column of objects.
    rows: every row has every column; None where there is nothing.
    folder: where paths in it start; None for datasets.
    class_names: by column, the names that its numbers stand for, where the file has them.
    """

    what: str
    columns: list[str]
    rows: list[Record]
    folder: Path | None = None
    class_names: dict[str, list[str]] = field(default_factory=dict)


def read_records(data: str, split: str | None = None, limit: int | None = None) -> Records:
    """The rows of a file, of a folder or of a dataset.

    Parameters
    ----------
    data: a .csv, .tsv, .jsonl (or .json) or .parquet file; a folder with a folder for each class; a folder
        that ``datasets`` saved; or the name of a dataset, ``owner/name`` or ``owner/name:config``.
    split: which part: of a dataset, or of a file with a column ``split``. Default: validation, test or train,
        the first that the dataset has; everything, of a file.
    limit: the largest number of rows, evenly over all: rows are often sorted by label.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "t.csv").write_text('text,label\\n"so, so",1\\nfine,2\\n')
    ...     table = read_records(f"{folder}/t.csv")
    >>> table.columns, table.rows[0]
    (['text', 'label'], Record(where='line 2', values={'text': 'so, so', 'label': '1'}))
    """
    path = Path(data).expanduser()
    if path.is_dir():
        saved = any(
            (path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json", "state.json")
        )
        table = _from_datasets(data, split, limit, path) if saved else _class_folders(path)
        split = None if saved else split
    elif path.exists() or path.suffix.lower() in _SUFFIXES:
        table = _read_file(path)
    elif HUB_NAME.fullmatch(data):
        table, split = _from_datasets(data, split, limit), None
    else:
        raise ValueError(f"data: there is no {data}; expected {EXPECTED}")
    if split is not None:
        table.rows = _part(table, split)
    if not table.rows:
        raise ValueError(
            f"data: {table.what} has no row; expected at least one under the names of its columns"
        )
    table.rows = [table.rows[i] for i in spread(len(table.rows), limit or 0)]
    return table


def _part(table: Records, split: str) -> list[Record]:
    if "split" not in table.columns:
        raise ValueError(
            f"split: got {split!r}, but {table.what} has no column 'split'; it has "
            f"{', '.join(table.columns)}: leave the option out, or give the file of that part"
        )
    parts = Counter(str(row.values["split"]) for row in table.rows)
    if split not in parts:
        raise ValueError(
            f"split: {table.what} has no {split!r}; its column 'split' has {', '.join(sorted(parts))}"
        )
    return [row for row in table.rows if str(row.values["split"]) == split]


def _read_file(path: Path) -> Records:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return _json_lines(path)
    if suffix in (".csv", ".tsv"):
        return _separated(path)
    raise ValueError(f"data: {path} ends in {suffix or 'nothing'}; expected {EXPECTED}")


def _separated(path: Path) -> Records:
    """A CSV file, whose cells may be quoted and may hold line breaks, or a TSV file, whose cells may not."""
    tabs = path.suffix.lower() == ".tsv"
    every = separated_rows(path, "\t") if tabs else separated_rows(path, None, quoted=True)
    rows = [row for row in every if any(cell.strip() for cell in row.cells)]
    if not rows:
        raise ValueError(f"data: {path} is empty; expected a line of names and rows under it")
    names = column_names(rows[0].cells, path)
    for line, cells in rows[1:]:
        if len(cells) != len(names):
            raise ValueError(
                f"data: line {line} of {path} has {len(cells)} cells; expected {len(names)}, as many as "
                f"the first line has names{'' if tabs else '; ' + QUOTING}"
            )
    records = [
        Record(f"line {line}", {name: cell or None for name, cell in zip(names, cells, strict=True)})
        for line, cells in rows[1:]
    ]
    return Records(str(path), names, records, path.parent)


def _json_lines(path: Path) -> Records:
    """JSON lines: an object on every line; or one list of objects."""
    text = read_text(path)
    rows: list[Record] = []
    if text.lstrip().startswith("["):
        try:
            for number, values in enumerate(parse_json(text, list[dict[str, object]]), 1):
                rows.append(Record(f"row {number}", values))
        except ValueError as error:
            raise ValueError(f"data: {path} is not a list of objects ({first_line(error)})") from None
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                rows.append(Record(f"line {number}", parse_json(line, dict[str, object])))
            except ValueError as error:
                raise ValueError(
                    f"data: line {number} of {path} is not a JSON object ({first_line(error)}); expected one "
                    "on every "
                    'line, as {"text": "...", "label": 1}'
                ) from None
    if not rows:
        raise ValueError(f"data: {path} is empty; expected an object on every line")
    return _with_columns(Records(str(path), [], rows, path.parent))


def _parquet(path: Path) -> Records:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError("Parquet files need pyarrow: pip install 'manyheads[tables]'") from None
    content = read_bytes(path, "data")
    with in_one_sentence(f"data: {path} is not a readable Parquet file"):
        table = pyarrow.parquet.read_table(io.BytesIO(content))
        rows = [Record(f"row {number}", values) for number, values in enumerate(table.to_pylist(), 1)]
    records = _with_columns(Records(str(path), list(table.column_names), rows, path.parent))
    records.class_names = _names_in_schema(table.schema)
    return records


def _names_in_schema(schema: pyarrow.Schema) -> dict[str, list[str]]:
    """The names of classes that ``datasets`` writes into a Parquet file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: list(map(str, one["names"])) for name, one in features.items() if "names" in one}
    except (KeyError, TypeError, ValueError):
        return {}


def _with_columns(table: Records) -> Records:
    """The table with the names of all its columns; parts of objects are columns, too."""
    names = dict.fromkeys(table.columns)
    for row in table.rows:
        for name, value in row.values.items():
            names[name] = None
            if isinstance(value, Mapping):
                names.update(dict.fromkeys(f"{name}.{part}" for part in value))
    table.columns = list(names)
    empty_row = dict.fromkeys(names)
    table.rows = [Record(row.where, empty_row | dict(row.values) | _parts(row.values)) for row in table.rows]
    return table


def _parts(values: Mapping[str, object]) -> dict[str, object]:
    return {
        f"{name}.{part}": item
        for name, value in values.items()
        if isinstance(value, Mapping)
        for part, item in value.items()
    }


def _class_folders(path: Path) -> Records:
    """A folder with a folder for each class, which hold images or sounds: columns ``file`` and ``label``."""
    files = sorted(file for file in path.glob("*/**/*") if file.suffix.lower() in SOUNDS | IMAGES)
    if not files:
        raise ValueError(
            f"data: {path} has no folders with images or sounds in them; expected one for each class, or "
            f"a file: {EXPECTED}"
        )
    rows = []
    for file in files:
        name = file.relative_to(path)
        rows.append(Record(str(name), {"file": str(name), "label": name.parts[0]}))
    return Records(str(path), ["file", "label"], rows, path)


def open_dataset(
    name: str, option: str, expected: str, folder: Path | None = None, **settings: object
) -> Any:
    """A dataset of the hub, NAME or NAME:CONFIG, or one that ``datasets`` saved in a folder.

    ``option`` and ``expected`` are for the error where there is none, ``settings`` for ``load_dataset``.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("datasets need the package datasets: pip install 'manyheads[data]'") from None
    repository, _, config = name.partition(":")
    try:
        if folder is not None:
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(repository, config or None, **settings)
    except Exception as error:
        raise ValueError(
            f"{option}: {name!r} is neither a file here nor a dataset that can be read "
            f"({describe_error(error)}); expected {expected}"
        ) from error


def _from_datasets(name: str, split: str | None, limit: int | None, folder: Path | None = None) -> Records:
    """A dataset of the hub, or one that ``datasets`` saved in a folder."""
    dataset = open_dataset(name, "data", EXPECTED, folder)
    if isinstance(dataset, Mapping):
        chosen = split or next((part for part in SPLITS if part in dataset), next(iter(dataset), ""))
        if chosen not in dataset:
            raise ValueError(f"split: {name} has no {chosen!r}; it has {', '.join(dataset)}")
        dataset = dataset[chosen]
        name = f"{name}, {chosen}"
    elif split is not None:
        raise ValueError(f"split: got {split!r}, but {name} has no splits; leave the option out")
    names = {
        column: list(feature.names)
        for column, feature in dataset.features.items()
        if hasattr(feature, "names")
    }
    undecoded = _undecoded(dataset.select(spread(len(dataset), limit or 0)))
    numbers = [i + 1 for i in spread(len(dataset), limit or 0)]
    rows = [Record(f"row {n}", dict(row)) for n, row in zip(numbers, undecoded, strict=True)]
    return _with_columns(Records(name, list(dataset.column_names), rows, None, names))


def _undecoded(read: Any) -> Sequence[Mapping[str, object]]:
    """The rows with sounds and images as bytes or paths, which are then decoded one batch at a time."""
    import datasets

    for column, feature in read.features.items():
        if isinstance(feature, datasets.Audio | datasets.Image):
            read = read.cast_column(column, type(feature)(decode=False))
    rows: Sequence[Mapping[str, Any]] = read
    return rows


def is_missing(value: object) -> bool:
    """Whether a cell holds nothing: no value, an empty text, no number.

    >>> is_missing(" "), is_missing(float("nan")), is_missing(0)
    (True, True, False)
    """
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))
