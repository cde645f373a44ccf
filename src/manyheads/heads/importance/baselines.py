"""Importance without the model's output: `confidence`, `output_norm`; and `random`, the control."""

from __future__ import annotations

from dataclasses import replace

import torch

from manyheads.common.devices import batches_to_device
from manyheads.common.run_batch import run
from manyheads.heads.importance.request import Request
from manyheads.heads.observer import Sums, observed
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import watch
from manyheads.nn.statistics import StatisticsSet


def confidence(request: Request) -> HeadTable:
    """The largest attention weight of a query, on average over batches: heads that know where to look."""
    return _watch_batches(request, "confidence", "confidence", "full", "largest attention weight of a query")


def output_norm(request: Request) -> HeadTable:
    """The length of a head's output vector, on average over batches: heads that write much."""
    return _watch_batches(request, "output-norm", "output_norm", "core", "length of the head's output")


def random(request: Request) -> HeadTable:
    """The control: a random number between 0 and 1 for each head and batch."""
    sums = Sums()
    generator = torch.Generator().manual_seed(request.seed)
    with observed(request.model) as observer:
        for number, batch in enumerate(batches_to_device(request.batches, observer.device), 1):
            if not observer.sites:
                observer.forward(batch)
            sums.add({s.name: torch.rand(1, s.heads, generator=generator) for s in observer.sites})
            request.report("random", number)
        return observer.table(sums.by_column, "nothing")


def _watch_batches(
    request: Request, method: str, column: str, statistics: StatisticsSet, measure: str
) -> HeadTable:
    tables: list[HeadTable] = []
    with observed(request.model) as observer, torch.no_grad():
        for number, batch in enumerate(batches_to_device(request.batches, observer.device), 1):
            with watch(request.model, statistics) as seen:
                run(request.model, batch)
            table = seen.table
            mean = table[column]  # (heads,), nan where nothing was counted
            counted = mean.isfinite()
            parts = torch.stack([counted.double(), mean.nan_to_num(), mean.nan_to_num().pow(2)])
            tables.append(replace(table, sums={"importance": parts}))
            request.report(method, number)
    merged = tables[0].merge(*tables[1:])
    merged.labels["measure"] = [measure] * len(merged)
    return merged
