"""What is kept of a running module: its path, what it called, and where its last queries were in memory."""

from __future__ import annotations

from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.tensor_tags import memory_of


class Frame:
    """One running module."""

    __slots__ = (
        "calls", "contractions", "functions", "is_leaf", "module", "name", "number", "parts", "path", "piece",
        "quantised", "queries_seen",
    )  # fmt: skip

    def __init__(self, module: nn.Module, path: str, number: int, quantised: bool = False) -> None:
        self.module = module
        self.path = path
        self.number = number  # which run of the module this is
        self.piece: Piece | None = None  # the queries last seen here
        self.calls = 0  # attention calls seen here
        self.queries_seen = 0  # queries of a sequence seen here, where they come in pieces
        self.contractions = 0  # products of weights and values seen here, attention or not
        self.name: str | None = None  # of the site, where all calls are of one
        self.parts: list[Call] = []  # calls for some heads each, until all are there
        self.functions = 0  # a hash of the functions that ran since the last step
        self.is_leaf = True  # no other module ran inside
        self.quantised = quantised  # a linear map, whatever it does


class Piece:
    """Where in memory the queries and keys of a call are, kept so that it is not reused."""

    __slots__ = ("end", "kept", "key", "mask", "name", "query", "start", "storage")

    def __init__(self, query: Tensor, key: Tensor | None, mask: tuple[object, ...]) -> None:
        self.storage, self.kept = memory_of(query), (query, key)
        self.start = int(query.storage_offset())
        self.end = int(self.start + query.shape[-2] * query.stride(-2))
        self.query = query.shape
        self.key = None if key is None else (memory_of(key), key.storage_offset())
        self.mask = mask
        self.name = ""

    def same(self, last: Piece) -> bool:
        """Whether these are the same queries and keys, under the same mask."""
        return (
            self._beside(last)
            and len(self.mask) == len(last.mask)
            and all(
                a is b or (not isinstance(a, Tensor) and a == b)
                for a, b in zip(self.mask, last.mask, strict=True)
            )
            and (self.start, self.query) == (last.start, last.query)
            and self.key is not None
            and self.key == last.key
        )

    def follows(self, last: Piece) -> bool:
        """Whether these queries begin where the last ones ended."""
        return self._beside(last) and self.start == last.end

    def _beside(self, last: Piece) -> bool:
        return self.storage == last.storage
