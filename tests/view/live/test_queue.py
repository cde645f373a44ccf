"""The queue: one job at a time, clients in turn, nothing for browsers that went away, spare time."""

import threading
from concurrent.futures import CancelledError

import pytest

from manyheads.view.live import queue as queues
from manyheads.view.live.queue import OthersWaitError, Queue

A, B, C = ("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3)


@pytest.fixture
def queue():
    made = Queue()
    yield made
    made.close()
    assert not made._thread.is_alive()


class Hold:
    """A job that runs until it is let go."""

    def __init__(self, queue):
        self.started, self.free = threading.Event(), threading.Event()
        self.future = queue.submit(("127.0.0.9", 9), self)
        assert self.started.wait(10)

    def __call__(self):
        self.started.set()
        assert self.free.wait(10)

    def go(self):
        self.free.set()
        self.future.result(10)


def order(queue, *clients):
    """The order in which jobs run that these clients, (address, port), submit while the queue is held."""
    ran = []
    held = Hold(queue)
    futures = [queue.submit(client, lambda client=client: ran.append(client)) for client in clients]
    held.go()
    for future in futures:
        future.result(10)
    return ran


def test_connections_take_turns(queue):
    assert order(queue, A, A, A, B, C) == [A, B, C, A, A]


def test_who_had_a_turn_longest_ago_comes_first(queue):
    order(queue, A, B, C)
    assert order(queue, C, B, A) == [A, B, C]


def test_new_connections_do_not_pass_one_that_waits(queue):
    """Who comes with a new connection each time gains nothing by it."""
    order(queue, A)
    order(queue, B)
    new = [("127.0.0.1", 100 + i) for i in range(48)]
    assert order(queue, *new, A)[0] == A
    newer = [("127.0.0.1", 200 + i) for i in range(48)]
    assert order(queue, *newer[:24], C, *newer[24:]).index(C) == 24


def test_an_address_with_many_connections_has_the_turns_of_one(queue):
    crowd = [("10.0.0.1", i) for i in range(48)]
    other = ("10.0.0.2", 1)
    assert order(queue, *crowd, other, other).index(other) == 1
    assert order(queue, *crowd, other, other)[:4].count(other) == 2


def test_what_is_remembered_of_clients_is_bounded(queue, monkeypatch):
    monkeypatch.setattr(queues, "REMEMBERED", 10)
    order(queue, *[("127.0.0.1", i) for i in range(50)])
    assert len(queue._last) == 10
    assert order(queue, A, B)


def test_what_nobody_waits_for_never_starts_and_makes_room(queue):
    ran = []
    held = Hold(queue)
    first = queue.submit(A, lambda: ran.append("first"))
    dropped = [queue.submit(A, lambda: ran.append("dropped")) for _ in range(2)]
    for future in dropped:
        queue.drop(future)
        assert future.cancelled()
    assert len(queue) == 1
    last = queue.submit(A, lambda: ran.append("last"))
    held.go()
    first.result(10)
    last.result(10)
    assert ran == ["first", "last"]
    assert len(queue) == 0


def test_an_error_goes_to_who_asked_and_the_thread_lives_on(queue):
    with pytest.raises(ZeroDivisionError):
        queue.submit(A, lambda: 1 // 0).result(10)
    with pytest.raises(KeyboardInterrupt):
        queue.submit(A, _interrupt).result(10)
    assert queue.submit(A, lambda: 7).result(10) == 7


def _interrupt():
    raise KeyboardInterrupt


def test_spare_time_ends_when_somebody_asks(queue, monkeypatch):
    monkeypatch.setattr(queues, "PAUSE", 0.0)
    begun, done, interrupted = threading.Event(), threading.Event(), []

    def steps():
        while not interrupted:
            begun.set()
            try:
                while True:
                    queue.yield_to_others()
            except OthersWaitError:
                interrupted.append(1)
            yield
        done.set()

    queue.in_spare_time(steps())
    assert begun.wait(10)
    assert queue.submit(A, lambda: len(interrupted)).result(10) == 1
    assert done.wait(10)


def endless(queue, begun):
    begun.set()
    while True:
        queue.check()


def test_what_nobody_waits_for_ends_while_it_runs(queue):
    begun = threading.Event()
    running = queue.submit(A, lambda: endless(queue, begun))
    other = queue.submit(B, lambda: 6 * 7)
    assert begun.wait(10)
    queue.check()  # of another thread: nothing to end here
    queue.drop(running)
    with pytest.raises(CancelledError):
        running.result(10)
    assert other.result(10) == 42


def test_closing_ends_what_runs():
    queue, begun = Queue(), threading.Event()
    running = queue.submit(A, lambda: endless(queue, begun))
    assert begun.wait(10)
    queue.close()
    with pytest.raises(CancelledError):
        running.result(10)


def test_closing_drops_what_waits_and_refuses_what_comes():
    queue = Queue()
    held = Hold(queue)
    waiting = queue.submit(A, lambda: None)
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not waiting.cancelled():
        pass
    held.go()
    closing.join(10)
    assert not queue._thread.is_alive()
    assert queue.submit(A, lambda: None).cancelled()
