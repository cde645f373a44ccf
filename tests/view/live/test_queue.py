"""The queue: one job at a time, clients in turn, nothing for browsers that went away, spare time."""

import threading
from concurrent.futures import CancelledError

import pytest

from manyheads.view.live import queue as queues
from manyheads.view.live.queue import FullError, OthersWaitError, Queue


@pytest.fixture
def queue():
    made = Queue(each=3, all=5)
    yield made
    made.close()
    assert not made._thread.is_alive()


class Hold:
    """A job that runs until it is let go."""

    def __init__(self, queue):
        self.started, self.free = threading.Event(), threading.Event()
        self.future = queue.submit("holder", self)
        assert self.started.wait(10)

    def __call__(self):
        self.started.set()
        assert self.free.wait(10)

    def go(self):
        self.free.set()
        self.future.result(10)


def test_clients_take_turns(queue):
    order = []
    held = Hold(queue)
    asked = ["a1", "a2", "a3", "b1", "c1"]
    futures = [queue.submit(name[0], lambda name=name: order.append(name)) for name in asked]
    held.go()
    for future in futures:
        future.result(10)
    assert order == ["a1", "b1", "c1", "a2", "a3"]


def test_what_nobody_waits_for_never_starts_and_makes_room(queue):
    ran = []
    held = Hold(queue)
    first = queue.submit("a", lambda: ran.append("first"))
    dropped = [queue.submit("a", lambda: ran.append("dropped")) for _ in range(2)]
    with pytest.raises(FullError):
        queue.submit("a", lambda: None)
    for future in dropped:
        queue.drop(future)
        assert future.cancelled()
    assert len(queue) == 1
    last = queue.submit("a", lambda: ran.append("last"))
    held.go()
    first.result(10)
    last.result(10)
    assert ran == ["first", "last"]
    assert len(queue) == 0


def test_a_full_queue_says_whose_fault_it_is(queue):
    held = Hold(queue)
    for _ in range(3):
        queue.submit("a", lambda: None)
    with pytest.raises(FullError) as own:
        queue.submit("a", lambda: None)
    assert own.value.own
    for client in "bc":
        queue.submit(client, lambda: None)
    with pytest.raises(FullError) as others:
        queue.submit("d", lambda: None)
    assert not others.value.own
    held.go()


def test_an_error_goes_to_who_asked_and_the_thread_lives_on(queue):
    with pytest.raises(ZeroDivisionError):
        queue.submit("a", lambda: 1 // 0).result(10)
    with pytest.raises(KeyboardInterrupt):
        queue.submit("a", _interrupt).result(10)
    assert queue.submit("a", lambda: 7).result(10) == 7


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
    assert queue.submit("a", lambda: len(interrupted)).result(10) == 1
    assert done.wait(10)


def endless(queue, begun):
    begun.set()
    while True:
        queue.check()


def test_what_nobody_waits_for_ends_while_it_runs(queue):
    begun = threading.Event()
    running = queue.submit("a", lambda: endless(queue, begun))
    other = queue.submit("b", lambda: 6 * 7)
    assert begun.wait(10)
    queue.check()  # of another thread: nothing to end here
    queue.drop(running)
    with pytest.raises(CancelledError):
        running.result(10)
    assert other.result(10) == 42


def test_closing_ends_what_runs():
    queue, begun = Queue(), threading.Event()
    running = queue.submit("a", lambda: endless(queue, begun))
    assert begun.wait(10)
    queue.close()
    with pytest.raises(CancelledError):
        running.result(10)


def test_closing_drops_what_waits_and_refuses_what_comes():
    queue = Queue()
    held = Hold(queue)
    waiting = queue.submit("a", lambda: None)
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not waiting.cancelled():
        pass
    held.go()
    closing.join(10)
    assert not queue._thread.is_alive()
    assert queue.submit("a", lambda: None).cancelled()
