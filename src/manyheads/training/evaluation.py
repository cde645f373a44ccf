"""Measuring a model on examples, alone or with other processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from manyheads.common.devices import device_of
from manyheads.common.interrupts import Interrupted, until_interrupted
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
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
    progress: Progress = no_progress,
    partly: bool = False,
) -> dict[str, float]:
    """The metrics of a model on these examples, or on some of them; the same in every process.

    Parameters
    ----------
    task, model: what is measured.
    examples: on what.
    indices: which of them. Default: all.
    batch_tokens: how many tokens run at once.
    progress: called after each batch, with the number of examples that this process has measured.
    partly: whether Ctrl-C ends it after the current batch, with the metrics of the batches so far.
    """
    try:
        from accelerate import PartialState
        from accelerate.utils import gather_object, send_to_device
    except ImportError:
        raise ImportError("evaluating needs accelerate: pip install 'manyheads[train]'") from None
    chosen = range(len(examples)) if indices is None else indices
    if not len(chosen):
        raise ValueError("data: got no examples to measure on; expected at least one")
    state = PartialState(cpu=not torch.accelerator.is_available())
    plan = bucketed([examples.sizes[i] for i in chosen], batch_tokens)[
        state.process_index :: state.num_processes
    ]
    device, done, total = device_of(model), 0, sum(map(len, plan))
    with evaluating(model):
        parts = []
        for batch in until_interrupted(plan) if partly else plan:
            taken = examples.take([chosen[i] for i in batch], 0)
            parts.append(task.measure(model, send_to_device(task.collate(taken), device)))
            done += len(batch)
            progress("measure", done, total)
    parts = gather_object(parts)
    if not parts:
        raise Interrupted
    return task.metrics(parts)
