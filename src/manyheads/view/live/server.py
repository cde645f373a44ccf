"""server: listen, tell where, and stop cleanly."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from manyheads.view.live.app import app
from manyheads.view.live.connections import IDLE, Connection
from manyheads.view.live.growing_document import Progress
from manyheads.view.live.queue import Queue
from manyheads.view.live.security import is_loopback
from manyheads.view.live.session import Live

PATIENCE = 2  # seconds that open requests get when the server stops


def serve(live: Live, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the live page of a model until somebody stops it by Ctrl-C or SIGTERM.

    Parameters
    ----------
    live: the model.
    host, port: where to listen; 0 for any port that is free.
    tell: told the address to open, as soon as it answers.
    """
    listening = listen(host, port)
    token = secrets.token_urlsafe(24)
    queue = Queue()
    progress = Progress(live, queue)
    served = app(live, queue, progress, host=host, token=token)
    # uvicorn hands a signal that ended it on to whoever had it before: that it ended is all that we want
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        queue.in_spare_time(progress.steps())
        tell(address(listening, host, token))
        uvicorn.Server(configured(served)).run(sockets=[listening])
    finally:
        queue.close()
        listening.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def configured(served: Any) -> uvicorn.Config:
    """How an application is served: connections with limits, and no more of HTTP than the page needs.

    uvicorn logs bytes that are no HTTP, one line each: who sends them could fill the terminal.
    """
    return uvicorn.Config(
        served,
        http=Connection,
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(IDLE),
        timeout_graceful_shutdown=PATIENCE,
        lifespan="off",
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; a ValueError that says what to do when it cannot."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise ValueError(f"host: {host!r} is no address of this machine ({error}); try 127.0.0.1") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(where)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ValueError(
            f"port: cannot listen at {host} port {port} ({error.strerror}); "
            "give another one by --port, or --port 0 for any that is free"
        ) from None
    return listening


def address(listening: socket.socket, host: str, token: str) -> str:
    """What to open in a browser. From elsewhere, the secret comes with it."""
    port = listening.getsockname()[1]
    if is_loopback(host):
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/#token={token}"
