"""Files and folders that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from os import PathLike
from pathlib import Path

_number = count()  # two threads may write the same file
_unfinished: set[Path] = set()
_LEFT = re.compile(r"\..+\.\d+-\d+")  # as `_temporary_path` names them


def write_whole(path: str | PathLike[str], content: bytes | str) -> None:
    """Write a file under another name, sync it to the disk, then rename it. Text is written as UTF-8.

    A full disk, Ctrl-C or a crash leaves the file as it was before, or the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(f"{folder}/note.txt", "all of it")
    ...     Path(f"{folder}/note.txt").read_text(), len(list(Path(folder).iterdir()))
    ('all of it', 1)
    """
    path = Path(path)
    with _temporary_path(path) as unfinished:
        with unfinished.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    _to_disk(path.parent)


@contextmanager
def whole_folder(path: str | PathLike[str]) -> Iterator[Path]:
    """A new folder to write into, renamed at the end; the path must be free or an empty folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with whole_folder(f"{parent}/model") as folder:
    ...         _ = (folder / "config.json").write_text("{}")
    ...     [file.name for file in Path(parent, "model").iterdir()]
    ['config.json']
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_path(path) as unfinished:
        unfinished.mkdir()
        yield unfinished
        for file in sorted(unfinished.rglob("*"), reverse=True):
            _to_disk(file)
        _to_disk(unfinished)
        os.replace(unfinished, path)
    _to_disk(path.parent)


def tidy(folder: Path, name: str = "") -> None:
    """Remove the unfinished files of killed processes in a folder, all or those of one name; the caller holds
    the lock.
    """
    for file in folder.glob(".*"):
        if _LEFT.fullmatch(file.name) and file.name.lstrip(".").startswith(name and f"{name}."):
            _remove(file)


def remove_unfinished() -> None:
    """Remove what this process has not finished writing, before it exits at once."""
    for path in list(_unfinished):
        _remove(path)


@contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """A temporary name beside a path; an error names the path, and leaves nothing there."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{next(_number)}")
    _unfinished.add(unfinished)
    try:
        yield unfinished
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        _remove(unfinished)
        _unfinished.discard(unfinished)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """Sync a file or folder to the disk."""
    if os.name != "posix" and path.is_dir():
        return  # folders can be opened on POSIX only
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
