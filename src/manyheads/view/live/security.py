"""Which requests are let through. Checked before anything else reads a request.

Another page in the same browser can send requests to this server (cross-site request forgery), and can make
its own host name point here (DNS rebinding). So the Host header must name this machine, the Origin of a
request must be our page, and everything but the page itself needs a token that only our page, or the person
who started the server, has.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from manyheads.view.live.request_bodies import Bodies, Receive, RefusedError

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TOKEN = "x-manyheads-token"
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    """An ASGI application around another one, which lets only permitted requests through.

    Parameters
    ----------
    app: the application.
    host: the address that the server listens on.
    token: the secret; every request under /api must carry it.
    bodies: reads request bodies; by default with the limits of `Bodies`.
    """

    def __init__(self, app: Any, *, host: str, token: str, bodies: Bodies | None = None) -> None:
        self.app, self.token, self.bodies = app, token.encode(), bodies or Bodies()
        self.names = names(host)
        self.anywhere = not is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        wrong = self.refused(scope["path"], headers)
        if wrong is not None:
            await refuse(sent, *wrong)
            return
        try:
            async with self.bodies.reading(receive) as body:
                await self.app(scope, body, sent)
        except RefusedError as error:
            await refuse(sent, error.status, error.sentence)

    def refused(self, path: str, headers: list[tuple[str, str]]) -> tuple[int, str] | None:
        """Why a request is refused, as a status and a sentence; None when it is let through."""

        def of(name: str) -> list[str]:
            return [value for key, value in headers if key == name]

        hosts = of("host")
        if len(hosts) != 1 or not self.knows(hosts[0]):
            name = hosts[0][:100] if hosts else "nothing"
            return (
                421,
                f"Host: this server does not have the name {name!r}; open the address that it printed",
            )
        origins = of("origin")
        if origins and any(not _same(origin, hosts[0]) for origin in origins):
            return (
                403,
                "Origin: other pages may not ask here; open the address that the server printed",
            )
        if not path.startswith("/api/"):
            return None
        if any(site not in ("same-origin", "none") for site in of("sec-fetch-site")):
            return 403, "other pages may not ask here; open the address that the server printed"
        tokens = of(TOKEN)
        if len(tokens) != 1 or not hmac.compare_digest(tokens[0].encode("utf-8"), self.token):
            return (
                403,
                "the token is missing or wrong; open the address that the server printed when it started",
            )
        for length in of("content-length"):
            if not length.isdecimal() or int(length) > self.bodies.largest:
                error = self.bodies.too_large()
                return error.status, error.sentence
        return None

    def knows(self, host: str) -> bool:
        """Whether a Host header names this machine. A foreign name can point here, an IP address cannot."""
        name = _without_port(host)
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.anywhere or address.is_loopback


def names(host: str) -> set[str]:
    """The names that a browser may use for a server that listens on this address.

    >>> names("127.0.0.1")
    {'localhost'}
    """
    if is_loopback(host):
        return {"localhost"}
    host_names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
    return host_names | ({host.lower()} if host else set())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """The name in ``name:port``, ``[address]:port``."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.lower().partition("://")
    return scheme in ("http", "https") and rest == host.strip().lower()


async def refuse(send: Send, status: int, sentence: str) -> None:
    """Answer with an error, and close the connection, on which more bytes may be on their way."""
    body = json.dumps({"error": sentence}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
