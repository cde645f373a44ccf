"""Files of a folder or of a zip archive, and tables with named columns that say something about them."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from manyheads.common.decompression import open_archive
from manyheads.data.readers import text


def listing(data: str, suffixes: Collection[str]) -> dict[str, Any]:
    """Files by their path inside a folder or a zip archive, in the order of these paths.

    Parameters
    ----------
    data: the folder, or the archive.
    suffixes: how their names end, in small letters: ``{".wav"}``.

    What is hidden, such as the folders that some programs put into archives, is left out.
    """
    root = Path(data).expanduser()
    if root.is_dir():
        found: dict[str, Any] = {
            file.relative_to(root).as_posix(): file for file in root.rglob("*") if file.is_file()
        }
    elif root.is_file() and zipfile.is_zipfile(root):
        archive = open_archive(root, "data")
        found = {name: zipfile.Path(archive, name) for name in archive.namelist() if not name.endswith("/")}
    else:
        what = "neither a folder nor a zip archive" if root.exists() else "not there"
        raise ValueError(f"data: {data} is {what}; expected a folder of files, or a zip archive of them")
    wanted = (name for name in sorted(found) if Path(name).suffix.lower() in suffixes)
    return {name: found[name] for name in wanted if not _hidden(name)}


def _hidden(name: str) -> bool:
    return any(part == "__MACOSX" or part.startswith(".") for part in name.split("/"))


def table(path: Any, columns: Collection[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a .tsv file by the names in its first line, each with the number of its line.

    Parameters
    ----------
    path: the file, or one in an archive.
    columns: names that must be there; others may.
    """
    lines = text.read_text(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    names = [name.strip() for name in lines[0].split("\t")]
    if missing := [name for name in columns if name not in names]:
        raise ValueError(
            f"data: {path} has no column {missing[0]!r} in its first line; it has {', '.join(names)}"
        )
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(names):
            raise ValueError(
                f"data: line {number} of {path} has {len(cells)} columns; expected {len(names)}, as the "
                "first line has, a tab between them"
            )
        rows.append((number, {name: cell.strip() for name, cell in zip(names, cells, strict=True)}))
    return rows
