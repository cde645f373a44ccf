"""The folder of results: created and locked before the work; errors are one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from manyheads.common.locks import LOCK, locked
from manyheads.common.processes import rank
from manyheads.common.whole_files import tidy


@contextmanager
def prepared(out: Path, only: str = "") -> Iterator[None]:
    """Create the folder, check that it can be written before the work, and lock it for this process; with
    ``only``, the name of a file, only that file: other processes write others beside it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise OSError(f"out: {out} cannot be written ({error.strerror}); give another folder") from error
    if rank() > 0:
        yield
        return
    with locked(out / f"{only and '.'}{only}{LOCK}", f"out: {out / only}"):
        tidy(out, only)
        yield


def check_free(out: Path, name: str = "out") -> None:
    """Raise a ValueError, which begins with ``name``, unless a new folder can be written there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{name}: {out} already exists; choose another folder, or remove it first")


def check_file(out: Path) -> None:
    """Raise a ValueError, before the work, unless a file can be written there, in a folder that may be new.

    >>> check_file(Path("/"))
    Traceback (most recent call last):
    ValueError: out: / is a folder; expected the name of a file
    """
    if out.is_dir():
        raise ValueError(f"out: {out} is a folder; expected the name of a file")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"out: {out} cannot be written, because {parent.name} is a file; give another name")


@contextmanager
def writing(out: Path, advice: str = "make room or give another folder") -> Iterator[None]:
    """Results are written inside: an error is one sentence, with advice."""
    try:
        yield
    except OSError as error:
        raise OSError(f"out: writing under {out} failed ({error.strerror}); {advice}") from error
