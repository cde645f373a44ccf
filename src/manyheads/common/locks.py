"""One process at a time in a folder: a second one gets an error, and a killed one leaves no lock."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"


@contextmanager
def locked(path: Path, what: str, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock on a file; the operating system releases it when the process ends.

    Parameters
    ----------
    path: the file, created if needed and removed at the end.
    what: what is locked, for the error message of another process.
    wait: for how many seconds to wait for another process that holds it.

    Raises
    ------
    ValueError if another process, or another part of this one, holds it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder) / LOCK, "out: here"):
    ...     with locked(Path(folder) / LOCK, "out: here"):
    ...         pass
    Traceback (most recent call last):
    ValueError: out: here is in use by process ...; wait for it, or give another folder
    """
    new = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            free = _take(handle)
            owner = "" if free else os.read(handle, 32).decode("ascii", "replace").strip()
            current = free and _is_at(handle, path)
        except BaseException:
            os.close(handle)
            raise
        if current:
            break
        os.close(handle)
        if not free and time.monotonic() < until:
            time.sleep(0.02)
        elif not free:
            holder = f"process {owner}" if owner else "another process"
            raise ValueError(f"{what} is in use by {holder}; wait for it, or give another folder")
    try:
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: a process that opened this file sees that it is gone
        os.close(handle)
        with suppress(OSError):  # folders that were created for the lock alone
            for folder in new:
                folder.rmdir()


def _is_at(handle: int, path: Path) -> bool:
    """Whether the locked file is still the one of that name: its last owner may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _take(handle: int) -> bool:
    """Lock an open file; False if another process holds it. File systems without locks always succeed."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
