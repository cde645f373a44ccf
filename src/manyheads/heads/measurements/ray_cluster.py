"""The parts of a text on a Ray cluster: workers hold the model, a lost worker's part is measured again."""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.common.errors import first_line
from manyheads.common.interrupts import stop_if_interrupted
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Keywords
from manyheads.data.batches import Corpus
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.measurements.parts import measure_part, merged_shard, result_of_shard
from manyheads.heads.measurements.shard import Shard, Share, find_shards
from manyheads.heads.measurements.verbs import Measurement
from manyheads.models.loaded import Loaded

Opener = Callable[[], tuple[Loaded, Corpus]]
# A part that loses this many workers is the reason why they die.
LOSSES = 3
# Parts for each worker by default: what is lost with a worker, and what the last one waits for, is small.
PARTS = 4
_STORE = 256 * 2**20  # bytes that parts take on their way, on this machine


@dataclass(frozen=True)
class Cluster:
    """Where to measure.

    address: of the cluster's head, HOST:PORT; ``auto`` for the one that this machine belongs to; ``local``
        for a new one on this machine, which ends with the work.
    workers: how many hold the model; by default one for each GPU, or for each processor where there is none.
    shards: into how many parts the text is cut; four for each worker by default.
    """

    address: str
    workers: int | None = None
    shards: int | None = None


class ShardWorker:
    """Holds the model and the text in a process of the cluster."""

    def __init__(self, opener: Opener, measurement: Measurement, folder: str) -> None:
        self._opener, self._measurement, self._folder = opener, measurement, folder
        self._open: tuple[Loaded, Corpus, str] | None = None

    def measure(self, share: Share) -> Shard:
        """One part of the text."""
        if self._open is None:
            with suppress(OSError):
                os.chdir(self._folder)  # paths are those of the command, where this machine has them
            loaded, corpus = self._opener()
            self._open = loaded, corpus, corpus.fingerprint
        loaded, corpus, text = self._open
        return measure_part(self._measurement, loaded, corpus, share, text=text)


def measured_on_ray(
    measurement: Measurement,
    loaded: Loaded,
    corpus: Corpus,
    opener: Opener,
    cluster: Cluster,
    keep: Path,
    progress: Progress = no_progress,
) -> object:
    """What a verb returns for a text, measured in parts on a Ray cluster.

    Parameters
    ----------
    measurement, loaded, corpus: what is measured, of which model, on which text.
    opener: opens the same model and text again, in the processes of the cluster.
    cluster: where.
    keep: the folder in which finished parts stay if Ctrl-C or an error ends the work: the next call with it
        measures the others.
    progress: called with how many parts are finished.
    """
    measurement.check()
    total = len(corpus.plan())
    for name, number in (("workers", cluster.workers), ("shards", cluster.shards)):
        if number is not None and not 1 <= number <= (total if name == "shards" else number):
            raise ValueError(f"{name}: got {number}; expected 1 or more, and shards for {total} batches")
    with _connected(cluster) as ray:
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        room = gpus or max(1, int(resources.get("CPU", 1)))
        workers = min(cluster.workers or room, room)
        count = cluster.shards or min(total, PARTS * workers)
        done = _kept(keep, count, measurement, loaded, corpus, total)
        kind = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(ShardWorker)
        try:
            _measure_all(
                ray, lambda: kind.remote(opener, measurement, os.getcwd()), done, count, workers, progress
            )
            shards = [done[number] for number in range(count)]
            result = result_of_shard(merged_shard(shards))
        except BaseException:
            for shard in done.values():
                shard.save(keep)
            raise
    for shard in shards:
        if shard.where:  # what an earlier call kept
            Path(shard.where).unlink(missing_ok=True)
    return result


def _measure_all(
    ray: Any, new: Callable[[], Any], done: dict[int, Shard], count: int, workers: int, progress: Progress
) -> None:
    """Fill ``done``, the parts by their numbers: a part that comes twice is there once."""
    waiting = deque(number for number in range(count) if number not in done)
    losses: Counter[int] = Counter()
    idle: list[Any] = []
    running: dict[Any, tuple[Any, int]] = {}  # a part on its way: who measures it, and its number
    progress("shards", len(done), count)
    while waiting or running:
        stop_if_interrupted()
        while waiting and len(running) < workers:
            worker, number = idle.pop() if idle else new(), waiting.popleft()
            running[worker.measure.remote(Share(number, count))] = worker, number
        while idle:  # others may wait for its processor
            ray.kill(idle.pop())
        ready, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
        for part in ready:
            worker, number = running.pop(part)
            try:
                done[number] = ray.get(part)
            except ray.exceptions.RayTaskError as error:
                raise ValueError(str(error.cause)) from None
            except ray.exceptions.RayError as error:
                losses[number] += 1
                if losses[number] == LOSSES:
                    raise ValueError(
                        f"ray: shard {Share(number, count)} lost {LOSSES} workers ({first_line(error)}); "
                        "expected ones that stay: is their memory too small?"
                    ) from None
                waiting.append(number)
            else:
                idle.append(worker)
                progress("shards", len(done), count)


def _kept(
    folder: Path, count: int, measurement: Measurement, loaded: Loaded, corpus: Corpus, total: int
) -> dict[int, Shard]:
    """The parts of the same measurement that an earlier call kept, by their numbers."""
    files = find_shards([folder]) if any(folder.glob(f"shard-*-of-{count}.*")) else []
    if not files:
        return {}
    expected = (
        measurement.verb, measurement.options, fingerprint(loaded.model), corpus.fingerprint, total,
    )  # fmt: skip
    done = {}
    for shard in map(Shard.load, files):
        about = shard.verb, shard.options, shard.fingerprint, shard.text, shard.total
        if about == expected and shard.share.endswith(f"/{count}"):
            done[Share.read(shard.share).number] = shard
    return done


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster; a ValueError if nothing answers."""
    try:
        import ray
    except ImportError:
        raise ImportError("--ray needs the package ray: pip install 'manyheads[cluster]'") from None
    address = cluster.address
    if address not in ("local", "auto"):
        _check_answers(address)
    where: Keywords = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        where |= {"num_cpus": cluster.workers, "include_dashboard": False, "object_store_memory": _STORE}
    try:
        ray.init(**where)
    except Exception as error:
        raise ValueError(
            f"ray: no cluster at {address!r} ({first_line(error)}); expected the address of a running one, "
            "HOST:PORT, or auto, or local"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise a ValueError unless a process listens there: Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"ray: got {address!r}; expected local, auto, or the HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ValueError(
            f"ray: nothing answers at {address} ({error.strerror or error}); expected the address of a "
            "running cluster, HOST:PORT, or local"
        ) from None
