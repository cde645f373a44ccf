"""Request bodies, read within a time limit and within one budget of bytes for all connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

LARGEST = 12 * 2**20  # bytes of one body: an image in base64
BUDGET = 48 * 2**20  # bytes of all bodies at once
FREE = 64 * 2**10  # bytes of each body that do not count, so that a text always has room
SECONDS = 20.0  # for a body to arrive
GONE = 499  # the status of an answer whose reader went away

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class RefusedError(Exception):
    """A body that is refused: the status of the answer, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


@dataclass(eq=False)
class Body:
    """The part of a body that has arrived, and when it began."""

    begun: float
    limit: asyncio.Timeout
    data: bytearray = field(default_factory=bytearray)
    size: int = 0
    complete: bool = False
    dropped: bool = False


class Bodies:
    """The bodies of all open requests.

    A piece is counted before it is stored. When the budget is spent, the body that arrives most slowly is
    dropped, so that no client can hold the budget by stalling. A body counts until its request is answered.

    Parameters
    ----------
    largest: bytes of one body.
    budget: bytes of all bodies together, without the first `FREE` bytes of each.
    seconds: for one body to arrive.
    """

    def __init__(self, *, largest: int = LARGEST, budget: int = BUDGET, seconds: float = SECONDS) -> None:
        self.largest, self.budget, self.seconds = largest, budget, seconds
        self._under_way: set[Body] = set()

    @property
    def counted(self) -> int:
        """The bytes that count against the budget now."""
        return sum(max(0, body.size - FREE) for body in self._under_way)

    @asynccontextmanager
    async def reading(self, receive: Receive) -> AsyncIterator[Receive]:
        """Read a body; gives a function that returns it in one piece. It counts until the context ends.

        Raises `RefusedError` for a body that is too large, too slow, or for which there is no room.
        """
        body = Body(asyncio.get_running_loop().time(), asyncio.timeout(self.seconds))
        self._under_way.add(body)
        try:
            try:
                async with body.limit:
                    last = await self._read(receive, body)
            except TimeoutError:
                raise self._late(body) from None
            messages = [last | {"body": bytes(body.data), "more_body": False}]
            body.data.clear()

            async def once() -> MutableMapping[str, Any]:
                return messages.pop() if messages else await receive()

            yield once
        finally:
            self._under_way.discard(body)

    async def _read(self, receive: Receive, body: Body) -> dict[str, Any]:
        while True:
            message = dict(await receive())
            if body.dropped:
                raise self._late(body)
            if message["type"] == "http.disconnect":
                raise RefusedError(GONE, "the browser went away")
            piece = message.get("body", b"")
            if body.size + len(piece) > self.largest:
                raise self.too_large()
            self._make_room(body, len(piece))
            body.data += piece
            if not message.get("more_body", False):
                body.complete = True
                return message

    def _make_room(self, body: Body, more: int) -> None:
        """Count more bytes, and drop the slowest incomplete bodies until all fit."""
        body.size += more
        now = asyncio.get_running_loop().time()
        while self.counted > self.budget:
            unfinished = [one for one in self._under_way if not one.complete and one.size > FREE]
            slowest = min(unfinished, key=lambda one: one.size / max(now - one.begun, 1e-9))
            slowest.dropped, slowest.size = True, 0
            slowest.data.clear()
            if slowest is body:
                raise self._late(body)
            slowest.limit.reschedule(now)

    def too_large(self) -> RefusedError:
        """The error for a body that is too large."""
        size = f"{self.largest // 2**20} MB"
        return RefusedError(413, f"the request is larger than {size}; give a shorter text or a smaller image")

    def _late(self, body: Body) -> RefusedError:
        if body.dropped:
            return RefusedError(503, "too much is being sent at once; try again in a moment")
        return RefusedError(
            408, f"the request did not arrive within {self.seconds:.0f} seconds; send it again"
        )
