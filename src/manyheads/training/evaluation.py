"""Measuring a model on examples, alone or with other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from manyheads.common.devices import device_of
from manyheads.common.interrupts import Interrupted, until_interrupted
from manyheads.common.preserved_state import evaluating
from manyheads.data.batches import bucketed
from manyheads.data.examples import Examples
from manyheads.training.task import Task


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    examples: Examples,
    indices: Sequence[int] | None = None,
    *,
    batch_tokens: int = 4096,
    step: Callable[[int], None] = lambda examples: None,
    partly: bool = False,
) -> dict[str, float]:
    """The metrics of a model on these examples, or on some of them; the same in every process.

    Parameters
    ----------
    task, model: what is measured.
    examples: on what.
    indices: which of them; all unless given.
    batch_tokens: how many tokens run at once.
    step: told how many examples are done.
    partly: whether Ctrl-C ends it after the batch that runs, with the metrics of what was measured by then.
    """
    chosen = range(len(examples)) if indices is None else indices
    if not len(chosen):
        raise ValueError("data: expected at least one example to measure on, got none")
    plan = bucketed([examples.sizes[i] for i in chosen], batch_tokens)
    shared = distributed.is_available() and distributed.is_initialized()
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if shared else (0, 1)
    mine = plan[rank::processes]
    device = device_of(model)
    with evaluating(model):
        parts = []
        for batch in until_interrupted(mine) if partly else mine:
            taken = examples.take([chosen[i] for i in batch], 0)
            parts.append(task.measure(model, moved(task.collate(taken), device)))
            step(len(batch))
    if processes > 1:
        gathered: list[Any] = [None] * processes
        distributed.all_gather_object(gathered, parts)
        parts = [part for process in gathered for part in process]
    if not parts:
        raise Interrupted
    return task.metrics(parts)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device.

    >>> moved({"ids": torch.ones(2)}, torch.device("meta"))["ids"].device.type
    'meta'
    """
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    return batch
