"""Importance from one backward pass for all heads: `fisher` and `gradient`."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.common.devices import batches_to_device
from manyheads.common.numbered_batches import count_of_all, generator_of, numbered
from manyheads.heads.importance.losses import fitting, loss_name, units
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import directions
from manyheads.heads.observer import Sums, gate_gradients, observed
from manyheads.heads.table import HeadTable

# Each sequence gives one square for each backward pass, right on average only: where there are few sequences,
# each batch gets several passes, up to SQUARES a batch. With ENOUGH over all batches, the random directions
# leave an error of 9%; sequences differ by more.
SQUARES = 32
ENOUGH = 256


def fisher(request: Request, squares: int = SQUARES, enough: int = ENOUGH) -> HeadTable:
    """What silencing each head would change, predicted to second order from gradients; no labels.

    The gradient of a distance between a model and itself is zero, so its curvature is what counts: with j the
    derivative of the output by a head's gate, half of j F j, where F is the Fisher information of the
    output's distribution (or the tangent space of the sphere, for embeddings). F is the mean square of random
    directions, so each backward pass along one of them estimates all heads at once; ``squares`` is the
    most of these estimates for a batch, ``enough`` for all batches together, at least one for each sequence.
    The unit is that of `leave_one_out` without a loss.
    """
    sums = Sums()
    count, remaining = count_of_all(request.batches), enough
    with observed(request.model) as observer:
        numbered_batches = numbered(request.batches, batches_to_device(request.batches, observer.device))
        for batches, (position, batch) in enumerate(numbered_batches, 1):
            forward = observer.forward(batch, gradients=True)
            value, generator = forward.output.value, generator_of(request.seed, position)
            share = remaining if count is None else enough // count
            draws = max(1, min(squares, share) // len(value))
            remaining = max(0, remaining - draws * len(value))
            total: dict[str, Tensor] = {}
            for number, direction in enumerate(directions(forward.output, generator, draws), 1):
                gradients = gate_gradients(forward.heads, value, direction, retain_graph=number < draws)
                for site, gradient in gradients.items():
                    # one row for several sequences is the sum over them of what is independent
                    square = gradient**2 * (len(gradient) / len(value) / 2 / draws)
                    total[site] = total[site] + square if site in total else square
            sums.add(total)
            request.report("fisher", batches)
        return observer.table(sums.by_column, forward.output.measure)


def gradient(request: Request) -> HeadTable:
    """How steeply the loss depends on each head's gate: the mean of |d loss / d gate| over sequences (or
    batches, for a loss that is one number for all).

    Without a loss, the one that fits the model (see `losses.fitting`).
    """
    sums = Sums()
    with observed(request.model) as observer:
        for batches, batch in enumerate(batches_to_device(request.batches, observer.device), 1):
            forward = observer.forward(batch, gradients=True)
            loss = request.loss or fitting(forward.result, request.model, observer.sites)
            with torch.enable_grad():
                value = units(loss, forward.result, batch)
            if not value.requires_grad:
                raise ValueError(
                    "loss: its value has no gradient; expected one computed from what the model returned"
                )
            gradients = gate_gradients(forward.heads, value, torch.ones_like(value))
            sums.add({site: g.abs() * (len(g) / len(value)) for site, g in gradients.items()})
            request.report("gradient", batches)
        return observer.table(sums.by_column, f"slope of the loss {loss_name(loss)}")
