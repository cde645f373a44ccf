"""The server of the live page: it listens, announces its address, and stops cleanly."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

import uvicorn

from manyheads.common.interrupts import signals_silenced
from manyheads.view.live.app import app
from manyheads.view.live.connections import IDLE, Connection
from manyheads.view.live.growing_document import GrowingDocument
from manyheads.view.live.queue import Queue
from manyheads.view.live.security import Guard, is_loopback
from manyheads.view.live.session import Live

PATIENCE = 2  # seconds that open requests get when the server stops


def serve(live: Live, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve the live page of a model until Ctrl-C or SIGTERM.

    Parameters
    ----------
    live: the model.
    host, port: where to listen; 0 for any free port.
    announce: called with the address to open, as soon as the page answers.
    """
    listening = listen(host, port)
    token = secrets.token_urlsafe(24)
    queue = Queue()
    document = GrowingDocument(live, queue)
    application = app(live, queue, document, host=host, token=token)
    with signals_silenced():
        try:
            queue.in_spare_time(document.steps())
            announce(address(listening, host, token))
            uvicorn.Server(configured(application)).run(sockets=[listening])
        finally:
            queue.close()
            listening.close()


def configured(application: Guard) -> uvicorn.Config:
    """How an application is served: connections with limits, and no more of HTTP than the page needs.

    uvicorn would log bytes that are not HTTP, one line each, with which an attacker could fill the terminal.
    """
    return uvicorn.Config(
        application,
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
        raise ValueError(
            f"host: {host!r} is not an address of this machine ({error}); try 127.0.0.1"
        ) from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(where)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ValueError(
            f"port: cannot listen at {host} port {port} ({error.strerror}); "
            "give another one by --port, or --port 0 for any free one"
        ) from None
    return listening


def address(listening: socket.socket, host: str, token: str) -> str:
    """The address to open in a browser; for other machines, with the token."""
    port = listening.getsockname()[1]
    if is_loopback(host):
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/#token={token}"
