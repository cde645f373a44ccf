"""One thread that runs the model, and many browsers that wait for their turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TypeVar, cast

REMEMBERED = 4096  # addresses and connections whose last turn is remembered
STOPPING = 10.0  # seconds that the running job gets to end when the queue is closed
PAUSE = 0.3  # seconds without a job after which spare time begins: typing is not slowed down

T = TypeVar("T")


class OthersWaitError(BaseException):
    """A request waits: work in spare time goes on later. No `except Exception` may catch it."""


class GivenUpError(BaseException):
    """The browser of the running job went away. No `except Exception` may catch it."""


Client = tuple[str, int]  # the address and the port of a connection


@dataclass(eq=False)
class Job:
    """A function to run, and the future of its result."""

    client: Client
    function: Callable[[], object]
    future: Future[object] = field(default_factory=Future)
    given_up: bool = False


class Queue:
    """Runs jobs one at a time in a thread of its own. Addresses take turns, as do connections of one address.

    The next turn is that of the address whose last turn is longest ago, and of the connection there whose
    last turn is longest ago. A new one counts as if it had just had its turn, so reconnecting gains nothing.
    A connection sends one request at a time, so there are never more jobs than connections.

    A job that is dropped before its turn never starts; a running one ends at its next call of `check`.

    Examples
    --------
    >>> queue = Queue()
    >>> queue.submit(("127.0.0.1", 50001), lambda: 6 * 7).result()
    42
    >>> queue.close()
    """

    def __init__(self) -> None:
        self._spare: Iterator[None] | None = None
        self._waiting: list[Job] = []  # in the order in which they came
        self._turn = 0
        self._last: OrderedDict[str | Client, int] = OrderedDict()  # turns of addresses and connections
        self._changed = threading.Condition()
        self._closing = False
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._work, name="manyheads-model")
        self._thread.start()

    def submit(self, client: Client, function: Callable[[], T]) -> Future[T]:
        """Run a function when its turn comes; after `close`, the future is cancelled."""
        job = Job(client, function)
        future = cast("Future[T]", job.future)
        with self._changed:
            if self._closing:
                future.cancel()
                return future
            for name in (client[0], client):
                self._last.setdefault(name, self._turn)
            self._waiting.append(job)
            self._changed.notify()
        future.add_done_callback(lambda _: self._forget(job))
        return future

    def drop(self, future: Future[T]) -> None:
        """Give up a job: its result is not wanted any more."""
        running = self._running
        if not future.cancel() and running is not None and running.future is future:
            running.given_up = True

    def check(self) -> None:
        """To be called often by what runs here: raises when its job was dropped, or when work in spare time
        has to make way. In other threads it does nothing.
        """
        if threading.current_thread() is not self._thread:
            return
        if self._running is None:
            self.yield_to_others()
        elif self._running.given_up or self._closing:
            raise GivenUpError

    def in_spare_time(self, steps: Iterator[None]) -> None:
        """Do these steps one at a time while no request waits. They must not raise."""
        with self._changed:
            self._spare = steps
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._waiting)

    def yield_to_others(self) -> None:
        """For work in spare time: raise `OthersWaitError` when a request waits, or the queue is closing."""
        if self._waiting or self._closing:
            raise OthersWaitError

    def close(self) -> None:
        """Drop waiting jobs, let the running one end at its next `check`, and end the thread.

        A job that does not come to its next `check` in time is not waited for: Ctrl-C must end the server.
        """
        with self._changed:
            self._closing = True
            dropped = list(self._waiting)
            self._changed.notify()
        for job in dropped:
            job.future.cancel()
        self._thread.join(STOPPING)

    def _forget(self, job: Job) -> None:
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def _next(self) -> Job | None:
        """The job whose turn it is; None when none waits."""
        if not self._waiting:
            return None
        job = min(self._waiting, key=lambda one: [self._since(one.client[0]), self._since(one.client)])
        self._waiting.remove(job)
        self._turn += 1
        for name in (job.client[0], job.client):
            self._last[name] = self._turn
            self._last.move_to_end(name)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return job

    def _since(self, name: str | Client) -> int:
        """The last turn of an address or a connection; 0 where it is no longer remembered."""
        return self._last.get(name, 0)

    def _work(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                while not (self._closing or self._waiting):
                    if self._spare is None:
                        self._changed.wait()
                    elif not self._changed.wait(pause):
                        break
                if self._closing:
                    return
                job = self._next()
            pause = 0.0 if job is None else PAUSE
            self._running = job
            if job is None:
                self._step()
            elif job.future.set_running_or_notify_cancel():
                try:
                    result = job.function()
                except GivenUpError:
                    job.future.set_exception(CancelledError())
                except BaseException as error:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)

    def _step(self) -> None:
        assert self._spare is not None
        try:
            next(self._spare)
        except StopIteration:
            self._spare = None
