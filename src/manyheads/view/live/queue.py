"""queue: one thread that runs the model, and many browsers that wait for it in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

EACH, ALL = 4, 32  # jobs that wait at once, of one client and of all
PAUSE = 0.3  # seconds without a job after which time is spare: who types is not kept waiting


class FullError(Exception):
    """There is no room to wait. `own` says whether the client's own jobs fill it."""

    def __init__(self, own: bool) -> None:
        self.own = own
        super().__init__(
            "this page asked for more than the model has answered so far; wait for an answer"
            if own
            else "too many people are asking the model at once; try again in a moment"
        )


class OthersWaitError(BaseException):
    """Somebody is waiting: what is done in spare time goes on later. No `except Exception` may keep it."""


class GivenUpError(BaseException):
    """Nobody waits for what is running any more. No `except Exception` may keep it."""


@dataclass(eq=False)
class Job:
    """Something to run, and where its result goes."""

    client: str
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    given_up: bool = False


class Queue:
    """Runs jobs one at a time in a thread of its own; clients take turns, however much each of them asks.

    A job that is dropped before its turn never starts, and makes room at once; one that runs ends as soon as
    it comes to `check`.

    Parameters
    ----------
    each, all: how many jobs of one client, and of all, may wait.

    Examples
    --------
    >>> queue = Queue()
    >>> queue.submit("somebody", lambda: 6 * 7).result()
    42
    >>> queue.close()
    """

    def __init__(self, *, each: int = EACH, all: int = ALL) -> None:
        self._spare: Iterator[None] | None = None
        self._each, self._all = each, all
        self._waiting: dict[str, deque[Job]] = {}  # clients in the order of their turns
        self._changed = threading.Condition()
        self._closing = False
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._work, name="manyheads-model")
        self._thread.start()

    def submit(self, client: str, run: Callable[[], Any]) -> Future[Any]:
        """Let something run when its turn comes. Raises `FullError`; once closed, futures are cancelled."""
        job = Job(client, run)
        with self._changed:
            if self._closing:
                job.future.cancel()
                return job.future
            own = self._waiting.get(client, ())
            if len(own) >= self._each or len(self) >= self._all:
                raise FullError(own=len(own) >= self._each)
            self._waiting.setdefault(client, deque()).append(job)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(job))
        return job.future

    def drop(self, future: Future[Any]) -> None:
        """Nobody waits for this result any more."""
        running = self._running
        if not future.cancel() and running is not None and running.future is future:
            running.given_up = True

    def check(self) -> None:
        """For whatever runs here, often: raise when nobody waits for it any more, or who comes first waits.

        Other threads may call it too: it concerns only the queue's own.
        """
        if threading.current_thread() is not self._thread:
            return
        if self._running is None:
            self.yield_to_others()
        elif self._running.given_up or self._closing:
            raise GivenUpError

    def in_spare_time(self, steps: Iterator[None]) -> None:
        """Go on by one of these steps at a time while nobody waits. They raise nothing."""
        with self._changed:
            self._spare = steps
            self._changed.notify()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def yield_to_others(self) -> None:
        """For work in spare time: raise `OthersWaitError` when somebody waits, or everything is to end."""
        if self._waiting or self._closing:
            raise OthersWaitError

    def close(self) -> None:
        """Drop what waits, let what runs end at its next `check`, and end the thread."""
        with self._changed:
            self._closing = True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            self._changed.notify()
        for job in dropped:
            job.future.cancel()
        self._thread.join()

    def _forget(self, job: Job) -> None:
        with self._changed:
            jobs = self._waiting.get(job.client)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._waiting[job.client]

    def _next(self) -> Job | None:
        """The first job of the client whose turn it is, who then stands last; None when nobody waits."""
        for client in list(self._waiting):
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs
            return job
        return None

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
                    result = job.run()
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
