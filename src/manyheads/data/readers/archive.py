"""The files of a folder or of a zip archive."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path

from manyheads.common.decompression import open_archive


def listing(data: str, suffixes: Collection[str]) -> dict[str, Path | zipfile.Path]:
    """Files by their path inside a folder or a zip archive, in the order of these paths.

    Parameters
    ----------
    data: the folder, or the archive.
    suffixes: how their names end, in lower case: ``{".wav"}``.

    Hidden files, such as those that some programs put into archives, are left out.
    """
    root = Path(data).expanduser()
    if root.is_dir():
        files: dict[str, Path | zipfile.Path] = {
            file.relative_to(root).as_posix(): file for file in root.rglob("*") if file.is_file()
        }
    elif root.is_file() and zipfile.is_zipfile(root):
        archive = open_archive(root, "data")
        files = {name: zipfile.Path(archive, name) for name in archive.namelist() if not name.endswith("/")}
    else:
        problem = "neither a folder nor a zip archive" if root.exists() else "not there"
        raise ValueError(f"data: {data} is {problem}; expected a folder of files, or a zip archive of them")
    names = (name for name in sorted(files) if Path(name).suffix.lower() in suffixes)
    return {name: files[name] for name in names if not _hidden(name)}


def _hidden(name: str) -> bool:
    return any(part == "__MACOSX" or part.startswith(".") for part in name.split("/"))
