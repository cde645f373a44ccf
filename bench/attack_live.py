"""`python -m bench.attack_live`: what a polite tab gets while the live server is attacked, and its memory.

It attacks only a server that it starts itself, on 127.0.0.1; every attack has a fixed number of connections
and a fixed length, and all of them end with the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.harness import machine, say, table
from bench.live import served

SECONDS = 12.0  # of one attack
CONNECTIONS = 256
TABS, BODIES, BODY = 48, 100, 11 * 2**20
POLITE = 16  # requests of the polite tab, each on a new connection
PATIENCE = 30.0  # seconds that the polite tab waits for an answer
REQUESTS = 2000


@dataclass
class Target:
    """The server under attack."""

    address: str
    token: str
    process: int
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def where(self) -> tuple[str, int]:
        """Its host and port."""
        parts = urlsplit(self.address)
        assert parts.hostname == "127.0.0.1"
        assert parts.port is not None
        return parts.hostname, parts.port

    def head(self, path: str, length: int, more: str = "") -> bytes:
        """The head of a request for JSON, whose body is so many bytes long."""
        return (
            f"{'POST' if length else 'GET'} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"x-manyheads-token: {self.token}\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n{more}\r\n"
        ).encode()

    def memory(self) -> float:
        """Megabytes of memory that the server holds now."""
        for line in Path(f"/proc/{self.process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return float("nan")


def connections(target: Target, count: int, begin: bytes) -> list[socket.socket]:
    """So many open connections, on which the same bytes were sent as far as the server takes them."""
    opened = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            one = socket.create_connection(target.where, timeout=2)
            opened.append(one)
            one.settimeout(0.5)
            if begin:
                one.sendall(begin)
    return opened


def drip(target: Target, opened: list[socket.socket], part: bytes) -> None:
    """Send a little on every connection each second, until the attack is over."""
    while not target.stop.wait(1.0):
        for one in opened:
            with contextlib.suppress(OSError):
                one.send(part)


def closed(opened: list[socket.socket]) -> int:
    """How many of them the server has closed, whatever it said before."""
    count = 0
    for one in opened:
        one.setblocking(False)
        try:
            while one.recv(2**16):
                pass
            count += 1
        except BlockingIOError:
            pass
        except OSError:
            count += 1
    return count


def silent(target: Target) -> list[socket.socket]:
    """Connections that say nothing."""
    return connections(target, CONNECTIONS, b"")


def slow_heads(target: Target) -> list[socket.socket]:
    """Connections that send a byte of their headers each second."""
    opened = connections(target, CONNECTIONS, b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
    threading.Thread(target=drip, args=(target, opened, b"a")).start()
    return opened


def slow_bodies(target: Target) -> list[socket.socket]:
    """Connections that send a byte of their body each second."""
    opened = connections(target, CONNECTIONS, target.head("/api/attend", 1000) + b'{"text": "')
    threading.Thread(target=drip, args=(target, opened, b"a")).start()
    return opened


def unread(target: Target) -> list[socket.socket]:
    """Connections that ask for the page again and again, and read nothing."""
    return connections(target, CONNECTIONS, 20 * target.head("/", 0))


def large_bodies(target: Target) -> list[socket.socket]:
    """Bodies of 11 MB, each of which lacks its last byte."""
    body = b'{"image": "' + b"A" * (BODY - 12)
    return connections(target, BODIES, target.head("/api/attend", BODY) + body)


def many_tabs(target: Target) -> list[socket.socket]:
    """Connections that ask as fast as they get answers, under another tab's name each time."""

    def ask(number: int) -> None:
        turn = 0
        while not target.stop.is_set():
            turn += 1
            body = json.dumps({"text": f"a cat {number} sees {turn} dogs"}).encode()
            status, _ = post(target, "/api/attend", body, f"x-manyheads-tab: {number}-{turn}\r\n")
            if status != 200:
                target.stop.wait(0.05)

    for number in range(TABS):
        threading.Thread(target=ask, args=(number,)).start()
    return []


Attack = Callable[[Target], list[socket.socket]]
ATTACKS: dict[str, Attack] = {
    f"{CONNECTIONS} silent connections": silent,
    f"{CONNECTIONS} slow headers": slow_heads,
    f"{CONNECTIONS} slow bodies": slow_bodies,
    f"{CONNECTIONS} that ask for 20 pages and read none": unread,
    f"{BODIES} unfinished bodies of 11 MB": large_bodies,
    f"{TABS} connections, a new tab name each time": many_tabs,
}


def post(target: Target, path: str, body: bytes, more: str = "") -> tuple[int, float]:
    """The status of an answer to a request on a connection of its own (0 for none), and its seconds."""
    begun = time.perf_counter()
    answer = b""
    try:
        with socket.create_connection(target.where, timeout=PATIENCE) as one:
            one.sendall(target.head(path, len(body), "connection: close\r\n" + more) + body)
            while got := one.recv(2**16):
                answer = answer[:64] + (got if not answer else b"")
    except OSError:
        return 0, time.perf_counter() - begun
    status = answer.split(b" ", 2)[1:2]
    return int(status[0]) if status else 0, time.perf_counter() - begun


def finish(target: Target) -> None:
    """Wait until the server has nothing left to measure."""
    import httpx

    headers = {"x-manyheads-token": target.token}
    while not httpx.get(f"{target.address}api/progress", headers=headers).json()["finished"]:
        time.sleep(1.0)


def polite(target: Target, until: float) -> tuple[Counter[int], float]:
    """What a tab gets that asks one thing at a time: answers by status, and the slowest one's seconds."""
    found, slowest = Counter[int](), 0.0
    for number in range(POLITE):
        if time.perf_counter() > until:
            break
        status, seconds = post(target, "/api/attend", json.dumps({"text": f"heads {number} attend"}).encode())
        found[status] += 1
        slowest = max(slowest, seconds)
        time.sleep(0.1)
    return found, slowest


@contextlib.contextmanager
def peak(target: Target) -> Iterator[list[float]]:
    """The most memory that the server held meanwhile, in MB."""
    over, most = threading.Event(), [target.memory()]

    def look() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], target.memory())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        over.set()
        looking.join()


def attacked(target: Target, attack: Attack) -> list[Any]:
    """What the polite tab got, the memory that the attack took, and how many connections were closed."""
    before, target.stop = target.memory(), threading.Event()
    begun = time.perf_counter()
    with peak(target) as most:
        opened = attack(target)
        found, slowest = polite(target, begun + 5 * SECONDS)
        target.stop.wait(max(0.0, begun + SECONDS - time.perf_counter()))
        target.stop.set()
    count = closed(opened)
    for one in opened:
        one.close()
    time.sleep(1.0)
    asked = found.total()
    others = ", ".join(f"{n} x {status or 'nothing'}" for status, n in sorted(found.items()) if status != 200)
    return [f"{found[200]} of {asked}", others or "-", f"{slowest:.2f}", f"{most[0] - before:+.0f}", count]


def growth(target: Target) -> str:
    """Memory after many requests beside that after the first tenth of them."""
    marks = []
    for number in range(REQUESTS):
        post(target, "/api/attend", json.dumps({"text": f"heads {number % 50}"}).encode())
        if number in (REQUESTS // 10, REQUESTS - 1):
            marks.append(target.memory())
    return f"{REQUESTS:,} requests one after the other: {marks[1] - marks[0]:+.0f} MB after the first tenth."


def main() -> None:
    """Attack, and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.attack_live", description=__doc__)
    parser.add_argument("--no-growth", action="store_true", help="leave out the 2,000 requests")
    options = parser.parse_args()
    rows = []
    with served() as (address, token, process):
        target = Target(address, token, process)
        say("waiting until everything is measured that is measured in spare time")
        finish(target)
        for name, attack in ATTACKS.items():
            say(name)
            rows.append([name, *attacked(target, attack)])
        grown = "" if options.no_growth else growth(target)
    header = [
        "attack",
        "polite tab answered",
        "refused",
        "slowest, s",
        "memory, MB",
        f"closed in {SECONDS:.0f} s",
    ]
    print(table(header, rows), flush=True)
    print(f"\n{grown}\n\n{machine('python -m bench.attack_live')}")


if __name__ == "__main__":
    main()
