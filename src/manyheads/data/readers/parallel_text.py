"""Parallel texts: sentences with their translations, from two files, a table, or a dataset of the hub."""

from __future__ import annotations

from pathlib import Path

from manyheads.data.readers import text
from manyheads.data.readers.table import read_rows

Pairs = list[tuple[str, str]]
PARTS = {"train": ("train",), "valid": ("val", "valid", "validation", "dev"), "test": ("test",)}


def read_pairs(data: str, source: str, target: str, part: str = "train") -> tuple[Pairs, int]:
    """Pairs of sentences, and how many were left out because one side was empty.

    Parameters
    ----------
    data: ``PREFIX`` where PREFIX.en and PREFIX.de are files with a sentence a line; a folder with files
        train.en, train.de, val.en and so on; a .tsv file with two columns; or a dataset (owner/name).
    source, target: the languages, as the files end or the columns are called.
    part: which part of a folder or dataset: "train", "valid" or "test".
    """
    path = Path(data).expanduser()
    if path.is_dir():
        prefixes = [path / name for name in PARTS[part]]
        prefix = next((p for p in prefixes if p.with_name(f"{p.name}.{source}").is_file()), None)
        if prefix is None:
            names = " or ".join(f"{p.name}.{source}" for p in prefixes)
            raise ValueError(f"data: {data} has no file {names}; expected parallel files by that name")
        pairs = _two_files(prefix, source, target)
    elif path.is_file():
        pairs = [(cells[0], cells[1]) for _, cells in read_rows(path, columns=2)]
    elif path.with_name(f"{path.name}.{source}").is_file():
        pairs = _two_files(path, source, target)
    elif text.is_hub_name(data):
        pairs = _hub(data, source, target, part)
    else:
        raise ValueError(
            f"data: there is no {data}; expected a prefix ({data}.{source} and {data}.{target}), a folder "
            "with train files, a .tsv file, or a dataset (owner/name)"
        )
    complete = [(one.strip(), other.strip()) for one, other in pairs if one.strip() and other.strip()]
    if not complete:
        raise ValueError(f"data: {data} holds no pair of sentences; expected at least one")
    return complete, len(pairs) - len(complete)


def has_part(data: str, source: str, part: str) -> bool:
    """Whether a folder has files of that part."""
    path = Path(data).expanduser()
    return path.is_dir() and any((path / f"{name}.{source}").is_file() for name in PARTS[part])


def _two_files(prefix: Path, source: str, target: str) -> Pairs:
    files = [prefix.with_name(f"{prefix.name}.{language}") for language in (source, target)]
    one, other = (text.read_text(file).removesuffix("\n").split("\n") for file in files)
    if len(one) != len(other):
        raise ValueError(
            f"data: {files[0]} has {len(one):,} lines and {files[1]} has {len(other):,}; "
            "expected equal numbers, each line the translation of the other"
        )
    return list(zip(one, other, strict=True))


def _hub(name: str, source: str, target: str, part: str) -> Pairs:
    split = {"valid": "validation"}.get(part, part)
    rows = text.from_hub(name, split, [])
    columns = rows.column_names
    if "translation" in columns:
        rows = rows["translation"]
        columns = list(rows[0]) if len(rows) else [source, target]
    if missing := {source, target} - set(columns):
        raise ValueError(f"data: {name} has no column {min(missing)!r}; it has {', '.join(columns)}")
    return [(str(row[source] or ""), str(row[target] or "")) for row in rows]  # what is missing is empty
