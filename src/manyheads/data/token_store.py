"""Token ids of many sequences: in memory while they are few, in a temporary file otherwise."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from tempfile import TemporaryFile
from typing import IO, overload

import numpy
from numpy.typing import NDArray

# Numbers that are held in memory before they are written to a file: 8 MB.
CHUNK = 2**20


class TokenStore:
    """Sequences of token ids, added one after the other and then read in any order.

    Memory does not grow with them: past a million, numbers are in a file without a name in the folder for
    temporary files (TMPDIR), 4 bytes for each token, which vanishes with the process.

    >>> store = TokenStore()
    >>> for ids in ([5, 7], [], [11]):
    ...     store.add(ids)
    >>> list(store[0]), len(store), list(store.sizes), store.counts[7]
    ([5, 7], 3, [2, 0, 1], 1)
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self.counts: Counter[int] = Counter()
        self._ids, self._ends = _Numbers("i", chunk), _Numbers("q", chunk)
        self._total = 0

    def add(self, ids: Sequence[int]) -> None:
        """Add a sequence."""
        self._total += len(ids)
        self.counts.update(ids)
        self._ids.extend(ids)
        self._ends.extend((self._total,))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sequence[int]:
        """The ids of a sequence."""
        ends = self._ends.read()
        start = int(ends[index - 1]) if index else 0
        ids: list[int] = self._ids.read()[start : int(ends[index])].tolist()
        return ids

    @property
    def sizes(self) -> Sequence[int]:
        """The number of ids of each sequence."""
        return Sizes(self._ends.read())


class Sizes(Sequence[int]):
    """The sizes of sequences, from where each of them ends in a file.

    >>> sizes = Sizes(numpy.array([2, 2, 3]))
    >>> list(sizes), sizes[2], sizes[1:], sum(sizes)
    ([2, 0, 1], 1, [0, 1], 3)
    """

    def __init__(self, ends: NDArray[numpy.int64]) -> None:
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return int(self._ends[index]) - (int(self._ends[index - 1]) if index else 0)


class _Numbers:
    """Whole numbers of one kind, appended, and read as an array."""

    def __init__(self, kind: str, chunk: int) -> None:
        self._kind, self._chunk = kind, chunk
        self._recent: array[int] = array(kind)
        self._written = 0
        self._file: IO[bytes] | None = None
        self._array: NDArray[numpy.int64] | None = None

    def __len__(self) -> int:
        return self._written + len(self._recent)

    def extend(self, numbers: Iterable[int]) -> None:
        self._recent.extend(numbers)
        self._array = None
        if len(self._recent) >= self._chunk:
            self._flush()

    def read(self) -> NDArray[numpy.int64]:
        """All numbers, mapped from the file where there is one."""
        if self._array is None:
            if self._file is None:
                self._array = numpy.array(self._recent, dtype=self._kind)
            else:
                self._flush()
                self._array = numpy.memmap(self._file, dtype=self._kind, mode="r", shape=(self._written,))
        return self._array

    def _flush(self) -> None:
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._recent.tofile(self._file)
        self._file.flush()
        self._written += len(self._recent)
        self._recent = array(self._kind)
