"""Importance from one backward pass for all heads: `fisher` and `gradient`."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.heads.importance.losses import called, fitting, units
from manyheads.heads.importance.request import Task
from manyheads.heads.model_outputs import directions
from manyheads.heads.observer import Sums, gate_gradients, moved, observed
from manyheads.heads.table import HeadTable

# Each sequence gives one square for each backward pass, right on average only: a batch of few sequences gets
# several passes.
SQUARES = 32


def fisher(task: Task, squares: int = SQUARES) -> HeadTable:
    """What silencing each head would change, predicted to second order from gradients; no labels.

    The gradient of a distance between a model and itself is zero, so its curvature is what counts: with j the
    derivative of the output by a head's gate, half of j F j, where F is the Fisher information of the
    output's distribution (or the tangent space of the sphere, for embeddings). F is the mean square of random
    directions, so each backward pass along one of them estimates all heads at once; ``squares`` is how many
    of those estimates there are to be for a batch, at least one for each sequence. In the unit of
    `leave_one_out` without a loss.
    """
    sums = Sums()
    generator = torch.Generator().manual_seed(task.seed)
    with observed(task.model) as observer:
        for batches, batch in enumerate(moved(task.batches, observer.device), 1):
            forward = observer.forward(batch, gradients=True)
            value = forward.output.value
            draws = max(1, squares // len(value))
            total: dict[str, Tensor] = {}
            for number, drawn in enumerate(directions(forward.output, generator, draws), 1):
                found = gate_gradients(forward.heads, value, drawn, again=number < draws)
                for site, gradient in found.items():
                    # one row for several sequences is the sum over them of what is independent
                    square = gradient**2 * (len(gradient) / len(value) / 2 / draws)
                    total[site] = total[site] + square if site in total else square
            sums.add(total)
            task.report("fisher", batches)
        return observer.table(sums.found, forward.output.measure)


def gradient(task: Task) -> HeadTable:
    """How steeply the loss depends on each head's gate: the mean of |d loss / d gate| over sequences (or
    batches, for a loss that is one number for all).

    Without a loss, the one that fits the model (see `losses.fitting`).
    """
    sums = Sums()
    with observed(task.model) as observer:
        for batches, batch in enumerate(moved(task.batches, observer.device), 1):
            forward = observer.forward(batch, gradients=True)
            loss = task.loss or fitting(forward.result, task.model, observer.sites)
            with torch.enable_grad():
                value = units(loss, forward.result, batch)
            if not value.requires_grad:
                raise ValueError(
                    "loss: its value has no gradient; expected one computed from what the model returned"
                )
            found = gate_gradients(forward.heads, value, torch.ones_like(value))
            sums.add({site: g.abs() * (len(g) / len(value)) for site, g in found.items()})
            task.report("gradient", batches)
        return observer.table(sums.found, f"slope of the loss {called(loss)}")
