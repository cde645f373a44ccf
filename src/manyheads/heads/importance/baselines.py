"""Importance from what heads do, without asking the output: `confidence`, `output_norm`; and `random`."""

from __future__ import annotations

from dataclasses import replace

import torch

from manyheads.common.run_batch import run
from manyheads.heads.importance.request import Task
from manyheads.heads.observer import Sums, moved, observed
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import watch
from manyheads.nn.statistics import StatisticsSet


def confidence(task: Task) -> HeadTable:
    """The largest attention weight of a query, on average: heads that know where to look. Over batches."""
    return _watched(task, "confidence", "confidence", "full", "largest attention weight of a query")


def output_norm(task: Task) -> HeadTable:
    """The length of a head's output vector, on average: heads that say much. Over batches."""
    return _watched(task, "output-norm", "output_norm", "core", "length of the head's output")


def random(task: Task) -> HeadTable:
    """The control: a number between 0 and 1 for each head and batch, that knows nothing."""
    sums = Sums()
    generator = torch.Generator().manual_seed(task.seed)
    with observed(task.model) as observer:
        for number, batch in enumerate(moved(task.batches, observer.device), 1):
            if not observer.sites:
                observer.forward(batch)
            sums.add({s.name: torch.rand(1, s.heads, generator=generator) for s in observer.sites})
            task.report("random", number)
        return observer.table(sums.found, "nothing")


def _watched(task: Task, method: str, column: str, statistics: StatisticsSet, measure: str) -> HeadTable:
    tables: list[HeadTable] = []
    with observed(task.model) as observer, torch.no_grad():
        for number, batch in enumerate(moved(task.batches, observer.device), 1):
            with watch(task.model, statistics) as seen:
                run(task.model, batch)
            table = seen.table
            mean = table[column]  # (heads,), nan where nothing was counted
            counted = mean.isfinite()
            parts = torch.stack([counted.double(), mean.nan_to_num(), mean.nan_to_num().pow(2)])
            tables.append(replace(table, sums={"importance": parts}))
            task.report(method, number)
    merged = tables[0].merge(*tables[1:])
    merged.labels["measure"] = [measure] * len(merged)
    return merged
