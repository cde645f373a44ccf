"""connections: how long a connection may take for what it does, and which one goes when there are too many.

uvicorn gives a connection time without end for its first request, and answers 503 to everybody when there are
too many connections: whoever holds them open shuts all others out. Here every connection has a time for what
it does, and when there are too many the one that has done nothing for longest makes room.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 256
# Seconds for the headers of a request, between two requests, and to read an answer. Bodies: `request_bodies`.
HEADERS, IDLE, UNREAD = 10.0, 30.0, 60.0
UNREAD_BYTES = 64 * 2**20  # of answers that nobody has read yet, of all connections
EVERY = 1.0  # seconds between two looks at the clock
_LIMITS = {"headers": HEADERS, "idle": IDLE, "unread": UNREAD}
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\n\r\n"
    b'{"error": "too many people are asking the model at once; try again in a moment"}'
)


class Connection(H11Protocol):
    """uvicorn's connection, with limits. One connection asks one thing at a time."""

    requests = 0  # that were answered
    doing = "headers"
    since = 0.0
    _waiting = False  # for an answer to be read, before the next request begins
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and make room for it where there is none."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self._open()) > CONNECTIONS and not self._make_room():
            transport.write(_FULL)
            transport.close()
            return
        self._timer = self.loop.call_later(EVERY, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        super().data_received(data)
        self._mark()

    def on_response_complete(self) -> None:
        """An answer was handed over to be sent. The next request waits until most of it was read: else its
        answer would be made, and kept, beside this one.
        """
        self.requests += 1
        self.doing = ""  # so that what comes next begins now, even if it has the same name
        if self.flow.write_paused and not self.transport.is_closing():
            self._waiting = True
        else:
            super().on_response_complete()
        self._mark()

    def resume_writing(self) -> None:
        """What was written is being read: go on with the next request."""
        super().resume_writing()
        if self._waiting:
            self._waiting = False
            super().on_response_complete()

    def pause_writing(self) -> None:
        """More is written here than read: of all connections, let those go that have not read for longest."""
        super().pause_writing()
        self._mark()
        unread = sorted((one for one in self._open() if one.unread), key=lambda one: one.since)
        while sum(one.unread for one in unread) > UNREAD_BYTES:
            unread.pop(0).transport.abort()

    @property
    def unread(self) -> int:
        """Bytes of answers that wait to be sent."""
        return int(self.transport.get_write_buffer_size())

    @property
    def address(self) -> str:
        """Of whoever is at the other end."""
        return self.client[0] if self.client else ""

    def _open(self) -> list[Connection]:
        return [
            one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()
        ]

    def _mark(self) -> None:
        """Note what the connection does now, and since when."""
        if (doing := self._doing()) != self.doing:
            self.doing, self.since = doing, self.loop.time()

    def _doing(self) -> str:
        cycle: Any = self.cycle
        if self.unread and (cycle is None or cycle.response_started):
            return "unread"
        if cycle is not None and not cycle.response_complete:
            return "body" if cycle.more_body else "asking"
        return "idle" if self.requests and not self.conn.trailing_data[0] else "headers"

    def _look(self) -> None:
        """End the connection if it takes too long for what it does."""
        self._mark()
        if self.loop.time() - self.since > _LIMITS.get(self.doing, float("inf")):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(EVERY, self._look)

    def _make_room(self) -> bool:
        """End another connection; False when there is none that may end.

        It is one from the address that has most of them: the one that has not asked anything for longest, and
        if all are being answered the newest, unless the address has no more than that of this connection.
        """
        others = [one for one in self._open() if one is not self]
        crowd = Counter(one.address for one in others)
        for one in others:
            one._mark()
        waiting = [one for one in others if one.doing != "asking"]
        if waiting:
            loser = min(waiting, key=lambda one: (-crowd[one.address], one.since))
        else:
            loser = max(others, key=lambda one: (crowd[one.address], one.since))
            if crowd[loser.address] <= crowd[self.address] + 1:
                return False
        loser.transport.abort()
        return True
