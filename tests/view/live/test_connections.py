"""Connections, with a clock and a wire of our own: what takes too long ends, a new one finds room."""

import json
import logging

import pytest
from uvicorn.server import ServerState

from manyheads.view.live import connections
from manyheads.view.live.connections import Connection
from manyheads.view.live.server import configured

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"


class Clock:
    """An event loop that only knows the time, and calls what is due."""

    def __init__(self):
        self.now, self.due, self.tasks = 0.0, [], []

    def time(self):
        return self.now

    def call_later(self, delay, call):
        timer = Timer(self.now + delay, call)
        self.due.append(timer)
        return timer

    def create_task(self, coroutine):
        self.tasks.append(coroutine)
        return Task()

    def pass_(self, seconds):
        until = self.now + seconds
        while ready := sorted((one for one in self.due if one.when <= until), key=lambda one: one.when):
            self.due.remove(ready[0])
            self.now = max(self.now, ready[0].when)
            if not ready[0].cancelled:
                ready[0].call()
        self.now = until


class Timer:
    def __init__(self, when, call):
        self.when, self.call, self.cancelled = when, call, False

    def cancel(self):
        self.cancelled = True


class Task:
    def add_done_callback(self, call):
        pass


class Wire:
    """A transport that keeps what is written, as if nobody read it when it is stuck."""

    def __init__(self, address, port):
        self.peer, self.written, self.closing, self.aborted, self.stuck = (
            (address, port),
            b"",
            False,
            False,
            0,
        )

    def get_extra_info(self, name, default=None):
        return {"peername": self.peer, "sockname": ("127.0.0.1", 8610)}.get(name, default)

    def write(self, data):
        self.written += data

    def get_write_buffer_size(self):
        return self.stuck

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    def abort(self):
        self.closing = self.aborted = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Hall:
    """Connections to one server."""

    def __init__(self):
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self.clock, self.state, self.config = Clock(), ServerState(), configured(lambda *_: None)
        self.state.default_headers = []
        self.ports = iter(range(1, 10_000))

    def connect(self, address="127.0.0.1"):
        self.clock.now += 0.001
        made = Connection(self.config, self.state, {}, _loop=self.clock)
        made.connection_made(Wire(address, next(self.ports)))
        return made

    def answered(self, address="127.0.0.1"):
        """A connection whose first request was answered."""
        made = self.connect(address)
        made.data_received(REQUEST)
        answer(made)
        return made

    def asking(self, address="127.0.0.1"):
        """A connection whose request has arrived and is not answered."""
        made = self.connect(address)
        made.data_received(REQUEST)
        return made


def answer(connection):
    """Answer what was asked, as a coroutine does that never has to wait."""
    for message in (
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]},
        {"type": "http.response.body", "body": b"{}"},
    ):
        with pytest.raises(StopIteration):
            connection.cycle.send(message).send(None)


@pytest.fixture
def hall():
    made = Hall()
    yield made
    for coroutine in made.clock.tasks:
        coroutine.close()


def test_a_connection_that_says_nothing_ends(hall):
    one = hall.connect()
    hall.clock.pass_(connections.HEADERS - 1)
    assert not one.transport.closing
    hall.clock.pass_(3)
    assert one.transport.aborted


def test_headers_that_come_byte_by_byte_end(hall):
    one = hall.connect()
    for byte in REQUEST[:14]:
        one.data_received(bytes([byte]))
        hall.clock.pass_(1)
    assert one.transport.aborted
    later = hall.answered()
    for byte in REQUEST[:14]:
        later.data_received(bytes([byte]))
        hall.clock.pass_(1)
    assert later.transport.aborted


def test_idling_ends_and_each_request_begins_it_anew(hall):
    one = hall.answered()
    for _ in range(3):
        hall.clock.pass_(connections.IDLE - 2)
        assert not one.transport.closing
        one.data_received(REQUEST)
        answer(one)
    hall.clock.pass_(connections.IDLE + 2)
    assert one.transport.closing


def test_who_waits_for_an_answer_may_wait(hall):
    one = hall.asking()
    hall.clock.pass_(1000)
    assert not one.transport.closing


def test_an_answer_that_nobody_reads_ends(hall):
    one = hall.answered()
    one.transport.stuck = 5
    hall.clock.pass_(connections.UNREAD + 3)
    assert one.transport.aborted


def test_unread_answers_have_a_budget(hall):
    first, second, other = hall.answered(), hall.answered(), hall.answered()
    for one in (first, second):
        one.transport.stuck = connections.UNREAD_BYTES // 2 + 1
        one.pause_writing()
        hall.clock.pass_(1)
    assert first.transport.aborted
    assert not second.transport.closing
    assert not other.transport.closing


def test_the_next_answer_waits_until_this_one_is_read(hall):
    one = hall.asking()
    one.data_received(REQUEST)
    one.transport.write = lambda data: one.pause_writing() if data == b"{}" else None
    one.transport.stuck = 5
    answer(one)
    assert len(hall.clock.tasks) == 1
    hall.clock.pass_(connections.IDLE + 2)  # there is time to read it
    assert not one.transport.closing
    one.resume_writing()
    assert len(hall.clock.tasks) == 2


@pytest.mark.parametrize("begin", [b"", REQUEST[:20], BODY])
def test_a_crowd_that_does_nothing_makes_room(hall, begin):
    crowd = [hall.connect() for _ in range(connections.CONNECTIONS)]
    for one in crowd:
        hall.clock.now += 0.001
        if begin:
            one.data_received(begin)
    for number in range(5):
        late = hall.asking()
        assert not late.transport.closing
        assert [one.transport.aborted for one in crowd].index(False) == number + 1
    assert sum(not one.transport.closing for one in crowd) == connections.CONNECTIONS - 5


def test_who_waits_for_an_answer_does_not_make_room(hall):
    waiting = hall.asking()
    crowd = [hall.connect() for _ in range(connections.CONNECTIONS - 1)]
    assert not hall.connect().transport.closing
    assert not waiting.transport.closing
    assert crowd[0].transport.aborted


def test_the_address_that_has_most_makes_room(hall):
    alone = hall.connect("10.0.0.2")
    crowd = [hall.connect("10.0.0.1") for _ in range(connections.CONNECTIONS - 1)]
    hall.connect("10.0.0.1")
    assert not alone.transport.closing
    assert crowd[0].transport.aborted


def test_when_everybody_is_being_answered_another_address_still_finds_room(hall):
    crowd = [hall.asking("10.0.0.1") for _ in range(connections.CONNECTIONS)]
    same = hall.connect("10.0.0.1")
    head, _, body = same.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert "too many" in json.loads(body)["error"]
    assert same.transport.closing
    assert not any(one.transport.closing for one in crowd)
    assert not hall.connect("10.0.0.2").transport.closing
    assert sum(one.transport.aborted for one in crowd) == 1


def test_a_connection_that_is_gone_leaves_no_timer(hall):
    one = hall.connect()
    one.connection_lost(None)
    hall.clock.pass_(2 * connections.HEADERS)
    assert not one.transport.aborted
    assert not [timer for timer in hall.clock.due if not timer.cancelled]
