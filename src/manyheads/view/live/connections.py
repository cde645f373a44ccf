"""Time limits of connections, and which connection is closed when there are too many.

uvicorn sets no time limit for the first request of a connection, and answers 503 to all when there are too
many connections: one client that holds them open shuts out all others. Here every state of a connection has a
time limit, and when there are too many connections, the one that has been idle for longest is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 256
# Seconds for the headers of a request, between two requests, to read an answer. Bodies: request_bodies.py.
HEADERS, IDLE, UNREAD = 10.0, 30.0, 60.0
UNREAD_BYTES = 64 * 2**20  # of answers that were not read yet, of all connections
EVERY = 1.0  # seconds between two checks of the limits
_LIMITS = {"headers": HEADERS, "idle": IDLE, "unread": UNREAD}
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\n\r\n"
    b'{"error": "too many requests at once; try again in a moment"}'
)


class Connection(H11Protocol):
    """uvicorn's connection, with limits. One connection sends one request at a time."""

    requests = 0  # that were answered
    doing = "headers"
    since = 0.0
    _waiting = False  # for an answer to be read, before the next request begins
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and make room for it where there is none."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self._open()) > CONNECTIONS and not self._make_room():
            transport.write(_FULL)
            transport.close()
            return
        self._timer = self.loop.call_later(EVERY, self._check_limits)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking its limits."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        super().data_received(data)
        self._mark()

    def on_response_complete(self) -> None:
        """An answer was passed on to be sent. The next request waits until most of it was read: else the next
        answer would be in memory, too.
        """
        self.requests += 1
        self.doing = ""  # so that what comes next begins now, even if it has the same name
        if self.flow.write_paused and not self.transport.is_closing():
            self._waiting = True
        else:
            super().on_response_complete()
        self._mark()

    def resume_writing(self) -> None:
        """The client reads the answer: go on with the next request."""
        super().resume_writing()
        if self._waiting:
            self._waiting = False
            super().on_response_complete()

    def pause_writing(self) -> None:
        """More was written than read: of all connections, close those that have not read for longest."""
        super().pause_writing()
        self._mark()
        unread = sorted((one for one in self._open() if one.unread), key=lambda one: one.since)
        while sum(one.unread for one in unread) > UNREAD_BYTES:
            unread.pop(0).transport.abort()

    @property
    def unread(self) -> int:
        """The bytes of answers that wait to be sent."""
        return int(self.transport.get_write_buffer_size())

    @property
    def address(self) -> str:
        """The address of the client."""
        return self.client[0] if self.client else ""

    def _open(self) -> list[Connection]:
        return [
            one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()
        ]

    def _mark(self) -> None:
        """Record what the connection does now, and since when."""
        if (doing := self._doing()) != self.doing:
            self.doing, self.since = doing, self.loop.time()

    def _doing(self) -> str:
        cycle: Any = self.cycle
        if self.unread and (cycle is None or cycle.response_started):
            return "unread"
        if cycle is not None and not cycle.response_complete:
            return "body" if cycle.more_body else "asking"
        return "idle" if self.requests and not self.conn.trailing_data[0] else "headers"

    def _check_limits(self) -> None:
        """Close the connection if it takes too long for what it does."""
        self._mark()
        if self.loop.time() - self.since > _LIMITS.get(self.doing, float("inf")):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(EVERY, self._check_limits)

    def _make_room(self) -> bool:
        """Close another connection; False when there is none that may be closed.

        It is one of the address with the most connections: the one that has been idle for longest; if all are
        being answered, the newest, unless that address has no more connections than the one of this client.
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
