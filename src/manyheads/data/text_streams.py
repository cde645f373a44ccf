"""Texts one at a time: of files, patterns, standard input, JSON lines, Parquet files, datasets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any

from manyheads.common.errors import first_line
from manyheads.common.json_files import in_one_sentence, parse_json
from manyheads.data.labelled.columns import choose_columns
from manyheads.data.labelled.language import HiddenTokens
from manyheads.data.readers.records import HUB_NAME, Records, is_missing, open_dataset
from manyheads.data.text_lines import read_lines

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
# Rows of a Parquet file that are in memory at once.
_ROWS = 1024


def read_texts(
    source: str | None, column: str | None = None, split: str | None = None, limit: int | None = None
) -> Iterator[str]:
    """The texts of a source, one at a time; memory does not grow with it.

    Parameters
    ----------
    source: a text file, one text per line; a .jsonl or .parquet file; a pattern such as ``"part-*.jsonl"``,
        whose files are read in the order of their names; ``-`` for standard input; the name of a dataset,
        ``owner/name`` or ``owner/name:config``, which is streamed; None for the built-in sample text.
    column: of JSON lines, Parquet files and datasets: text, sentence, review and the like by default.
    split: of a dataset; train by default.
    limit: the largest number of texts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.jsonl").write_text('{"text": "One."}\\n{"text": null}\\n{"text": "Two."}\\n')
    ...     _ = Path(folder, "b.jsonl").write_text('{"text": "Three."}\\n')
    ...     list(read_texts(f"{folder}/*.jsonl")), list(read_texts(f"{folder}/*.jsonl", limit=1))
    (['One.', 'Two.', 'Three.'], ['One.'])
    """
    if source is None or source == "-":
        _refuse(column, split, "standard input" if source else "the built-in sample text")
        yield from read_lines(source, limit)
        return
    path = Path(source)
    if not path.exists() and has_magic(source):
        files = sorted(file for file in glob(source, recursive=True) if Path(file).is_file())
        if not files:
            raise ValueError(f"text: no file matches {source}; expected a pattern that some files match")
        texts = (text for file in files for text in _of_file(file, column, split))
        yield from islice(texts, limit)
    elif not path.exists() and not path.suffix and HUB_NAME.fullmatch(source) and "/" in source:
        yield from islice(_of_dataset(source, column, split), limit)
    elif _is_table(path):
        yield from islice(_of_file(source, column, split), limit)
    else:
        _refuse(column, split, source)
        yield from read_lines(source, limit)


def reservoir(texts: Iterable[str], size: int, seed: int = 0) -> tuple[list[str], int]:
    """A random sample of texts that are read once, in their order, and how many there were.

    Every text is as likely as any other to be in it (Vitter's algorithm R), and it is the same every time.

    >>> reservoir(["a", "b", "c"], size=5)
    (['a', 'b', 'c'], 3)
    >>> sample, count = reservoir(map(str, range(1000)), size=3)
    >>> len(sample), count
    (3, 1000)
    """
    generator = random.Random(seed)
    sample: list[tuple[int, str]] = []
    number = -1
    for number, text in enumerate(texts):
        if len(sample) < size:
            sample.append((number, text))
        elif (chosen := generator.randrange(number + 1)) < size:
            sample[chosen] = number, text
    return [text for _, text in sorted(sample)], number + 1


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in (*JSON_LINES, *PARQUET)


def _refuse(column: str | None, split: str | None, source: str) -> None:
    for name, value in (("column", column), ("split", split)):
        if value is not None:
            raise ValueError(
                f"{name}: got {value!r}, but {source} has lines of text; expected it only with a .jsonl or "
                ".parquet file, or with a dataset"
            )


def _of_file(file: str, column: str | None, split: str | None) -> Iterator[str]:
    if not _is_table(Path(file)):
        _refuse(column, split, file)
        yield from read_lines(file, None)
        return
    if split is not None:
        _refuse(None, split, file)
    rows = _parquet(file, column) if Path(file).suffix.lower() in PARQUET else _json_lines(file)
    yield from _in_column(rows, file, column)


def _in_column(rows: Iterable[Mapping[str, Any]], what: str, column: str | None) -> Iterator[str]:
    """The texts in a column, those that are not missing."""
    any_text = False
    for row in rows:
        if column is None:
            column = choose_columns(Records(what, list(row), []), HiddenTokens.customs).inputs[0]
        if column not in row:
            raise ValueError(
                f"column: a row of {what} has no {column!r}; it has {', '.join(row) or 'nothing'}"
            )
        if not is_missing(row[column]):
            if not isinstance(row[column], str):
                kind = type(row[column]).__name__
                raise ValueError(f"column: {column!r} of {what} holds a {kind}; expected texts")
            any_text = True
            yield row[column]
    if not any_text:
        raise ValueError(f"text: {what} holds no text; expected at least one")


def _json_lines(file: str) -> Iterator[dict[str, object]]:
    for number, line in enumerate(read_lines(file, None), 1):
        try:
            yield parse_json(line, dict[str, object])
        except ValueError as error:
            raise ValueError(
                f"text: row {number} of {file} is not a JSON object ({first_line(error)}); expected one on "
                'every line, as {"text": "..."}'
            ) from None


def _parquet(file: str, column: str | None) -> Iterator[dict[str, object]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError("Parquet files need pyarrow: pip install 'manyheads[tables]'") from None
    with in_one_sentence(f"text: {file} is not a readable Parquet file"):
        opened = pyarrow.parquet.ParquetFile(file)
    with opened:
        names = opened.schema_arrow.names
        if column is None:
            column = choose_columns(Records(file, list(names), []), HiddenTokens.customs).inputs[0]
        if column not in names:
            raise ValueError(f"column: {file} has no {column!r}; it has {', '.join(names)}")
        for batch in opened.iter_batches(_ROWS, columns=[column], use_threads=False):
            yield from batch.to_pylist()


def _of_dataset(name: str, column: str | None, split: str | None) -> Iterator[str]:
    expected = "a file, a pattern of files, or the name of a dataset"
    rows = open_dataset(name, "text", expected, split=split or "train", streaming=True)
    yield from _in_column(rows, name, column)
