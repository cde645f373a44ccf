"""What every head of a model does on a corpus: counted exactly, by one process or many; Ctrl-C keeps it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from manyheads.common.devices import device_of, to_device
from manyheads.common.errors import describe_error
from manyheads.common.interrupts import Interrupted, interrupted
from manyheads.common.preserved_state import evaluating
from manyheads.common.processes import gathered, processes, rank
from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run_heads
from manyheads.common.types import Batch
from manyheads.data.batches import Corpus
from manyheads.heads.observer import shapes
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch, watch
from manyheads.nn.statistics import StatisticsSet


@dataclass
class Counted:
    """The counts of one process, or of all together."""

    table: HeadTable | None = None
    units: int = 0  # tokens or images that were read
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C
    error: Exception | None = None
    missed: dict[str, str] = field(default_factory=dict)


def count(
    model: nn.Module,
    batches: Iterable[tuple[int, Batch]],
    tokens: Mapping[str, Iterable[int]] | None = None,
    statistics: StatisticsSet = "full",
    progress: Progress = no_progress,
) -> Counted:
    """Run the model under watch. ``batches`` come with how many units (tokens, images) they hold.

    ``progress`` is called with the number of units that are counted.

    A batch counts in every layer or in none: what an error or Ctrl-C leaves is the table of whole batches.
    """
    counted = Counted()
    started = time.perf_counter()
    device = device_of(model)
    watcher: Watch | None = None
    try:
        with torch.no_grad(), evaluating(model), watch(model, statistics, tokens=tokens) as watcher:
            for units, batch in batches:
                if interrupted():
                    counted.stopped = True
                    break
                _run(model, to_device(batch, device))
                counted.table, counted.units = _table(watcher), counted.units + units
                progress("watch", counted.units, None)
    except (ValueError, TypeError, OSError) as error:
        counted.error = error
    counted.seconds = time.perf_counter() - started
    counted.missed = watcher.missed if watcher is not None else {}
    return counted


def count_corpus(model: nn.Module, corpus: Corpus, progress: Progress = no_progress) -> Counted:
    """Count a corpus; several processes share it, and each returns what all of them have counted.

    After Ctrl-C, the first process returns what there is to keep; the others, or all if there is nothing,
    raise `Interrupted`.
    """
    share = rank(), processes()
    units = corpus.total(*share)

    def report(stage: str, done: float, total: float | None) -> None:
        progress(stage, done, units)

    report("watch", 0, None)
    counted = merge_processes(count(model, corpus.batches(*share), corpus.groups, progress=report))
    if counted.stopped and (rank() > 0 or counted.table is None):
        raise Interrupted
    return counted


def _table(watcher: Watch) -> HeadTable:
    try:
        return watcher.table
    except IndexError as error:
        raise ValueError(
            "MODEL: its heads are not those that its original_heads name; get the model again"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"MODEL: {str(error).removeprefix('watch: ')}; expected a transformer whose attention is made of "
            "torch functions: choose such a model"
        ) from error


def _run(model: nn.Module, batch: Batch) -> None:
    try:
        run_heads(model, batch)
    except Exception as error:
        raise ValueError(
            f"MODEL: failed on a batch of {shapes(batch)} ({describe_error(error, 300)}); expected one "
            "that it can run: try shorter sequences, smaller batches, other ids"
        ) from error


def table_or_error(counted: Counted) -> HeadTable:
    """The table, or the error that says why there is none."""
    if counted.error is not None:
        raise counted.error
    if counted.table is None:
        if counted.stopped:
            raise Interrupted
        raise ValueError("batches: expected at least one, got none")
    return counted.table


def merge_processes(counted: Counted) -> Counted:
    """The counts of all processes, merged exactly; the same in each of them."""
    if processes() == 1:
        return counted
    # errors of other classes may not survive pickling
    error = None if counted.error is None else ValueError(str(counted.error))
    parts = gathered(replace(counted, error=error))
    tables = [part.table for part in parts if part.table is not None]
    if len({table.model for table in tables}) > 1:
        raise ValueError(
            "MODEL: the processes made different models, so their counts do not add up; expected the same "
            "weights in each: load them from a file, or draw them with a fixed seed"
        )
    return Counted(
        table=tables[0].merge(*tables[1:]) if tables else None,
        units=sum(part.units for part in parts),
        seconds=max(part.seconds for part in parts),
        stopped=any(part.stopped for part in parts),
        error=next((part.error for part in parts if part.error), None),
        missed={path: why for part in parts for path, why in part.missed.items()},
    )
