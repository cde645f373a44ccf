"""What every head of a model does on a corpus: counted exactly, by one process or many, kept on Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.interrupts import Interrupted, interrupted
from manyheads.common.preserved_state import evaluating
from manyheads.common.processes import processes, rank
from manyheads.common.progress import Progress, no_progress
from manyheads.data.batches import Corpus
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch, watch
from manyheads.nn.statistics import StatisticsSet


@dataclass
class Counted:
    """What one process, or all together, have counted."""

    table: HeadTable | None = None
    units: int = 0  # tokens or images that were read
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C
    error: Exception | None = None
    missed: dict[str, str] = field(default_factory=dict)


def count(
    model: nn.Module,
    batches: Iterable[tuple[int, Any]],
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
    seen: Watch | None = None
    try:
        with torch.no_grad(), evaluating(model), watch(model, statistics, tokens=tokens) as seen:
            for units, batch in batches:
                if interrupted():
                    counted.stopped = True
                    break
                _run(model, _moved(batch, device))
                counted.table, counted.units = _table(seen), counted.units + units
                progress("watch", counted.units, None)
    except (ValueError, TypeError, OSError) as error:
        counted.error = error
    counted.seconds = time.perf_counter() - started
    counted.missed = seen.missed if seen is not None else {}
    return counted


def count_corpus(model: nn.Module, corpus: Corpus, progress: Progress = no_progress) -> Counted:
    """Count a corpus; several processes share it, and each returns what all of them have counted."""
    share = rank(), processes()
    units = corpus.total(*share)

    def report(stage: str, done: float, total: float | None) -> None:
        progress(stage, done, units)

    report("watch", 0, None)
    return together(count(model, corpus.batches(*share), corpus.groups, progress=report))


def _table(seen: Watch) -> HeadTable:
    try:
        return seen.table
    except IndexError as error:
        raise ValueError(
            "MODEL: it has other heads than those that its original_heads name; get the model again"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"MODEL: {str(error).removeprefix('watch: ')}; expected a transformer whose attention is made of "
            "torch functions: give such a model"
        ) from error


def _run(model: nn.Module, batch: Any) -> None:
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in _tensors(batch))
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise ValueError(
            f"MODEL: failed on a batch of {shapes or type(batch).__name__} ({type(error).__name__}: {said}); "
            "expected one that it can run: try shorter sequences, smaller batches, other ids"
        ) from error


def _tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield "input", batch
    elif isinstance(batch, Mapping):
        yield from ((str(name), x) for name, x in batch.items() if isinstance(x, Tensor))
    elif isinstance(batch, tuple | list):
        yield from ((f"input {n}", x) for n, x in enumerate(batch) if isinstance(x, Tensor))


def _moved(batch: Any, place: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(place)
    if isinstance(batch, Mapping):
        return {name: _moved(x, place) for name, x in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_moved(x, place) for x in batch)
    return batch


def finished(counted: Counted) -> HeadTable:
    """The table, or the error that says why there is none."""
    if counted.error is not None:
        raise counted.error
    if counted.table is None:
        if counted.stopped:
            raise Interrupted
        raise ValueError("batches: expected at least one, got none")
    return counted.table


def together(own: Counted) -> Counted:
    """What all processes have counted, merged exactly; the same in each of them."""
    if processes() == 1:
        return own
    from torch import distributed

    started_here = not distributed.is_initialized()
    if started_here:
        distributed.init_process_group("gloo")
    try:
        parts: list[Any] = [None] * distributed.get_world_size()
        told = None if own.error is None else ValueError(str(own.error))  # others' errors may not travel
        distributed.all_gather_object(parts, replace(own, error=told))
    finally:
        if started_here:
            distributed.destroy_process_group()
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
