"""Importance by learning which heads to keep: `learned_gates`, with hard concrete gates.

Louizos, Welling, Kingma, "Learning sparse neural networks through L0 regularization" (2018); on heads: Voita
and others, "Analyzing multi-head self-attention" (2019). Each head is multiplied by a random gate that can be
exactly 0 or 1 and still has a gradient; a target number of open gates is kept while the model, which does not
change, is asked to say what it said.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads.common.devices import batches_to_device
from manyheads.common.types import Batch
from manyheads.heads.importance.losses import units
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import output_distance
from manyheads.heads.observer import Forward, Observer, Sums, observed
from manyheads.heads.table import HeadTable

STEPS, RESTARTS, RATE = 120, 3, 0.3
_SOFTNESS, _LOW, _HIGH = 2 / 3, -0.1, 1.1  # as in the literature: how a sigmoid is stretched and cut off
_SHIFT = _SOFTNESS * math.log(-_LOW / _HIGH)


def learned_gates(request: Request, steps: int = STEPS, restarts: int = RESTARTS) -> HeadTable:
    """The probability that a head's gate is open, after learning to keep ``request.gates`` heads (half by
    default).

    What is learned against: the loss, or without one the distance from what the full model says. Every few
    steps take the next batch, round and round. Learned ``restarts`` times with other random numbers; the
    standard error is over those.
    """
    sums = Sums()
    with observed(request.model) as observer:
        batches = list(batches_to_device(request.batches, observer.device))
        full = [observer.forward(batch) for batch in batches]
        observer.check("gates", request.unverified)
        heads = {site.name: site.heads for site in observer.sites}
        open_gates = sum(heads.values()) // 2 if request.gates is None else request.gates
        if not 0 < open_gates < sum(heads.values()):
            raise ValueError(f"gates: expected 1 to {sum(heads.values()) - 1} heads, got {open_gates}")
        for restart in range(restarts):
            generator = torch.Generator().manual_seed(request.seed + restart)
            probabilities = _learned(request, observer, batches, full, heads, open_gates, steps, generator)
            sums.add(dict(zip(heads, probabilities.unsqueeze(0).split(list(heads.values()), 1), strict=True)))
            request.progress("gates", restart + 1, restarts)
        return observer.table(
            sums.by_column, f"probability of an open gate, {open_gates} of {len(probabilities)} heads"
        )


def _learned(
    request: Request,
    observer: Observer,
    batches: list[Batch],
    full: list[Forward],
    heads: dict[str, int],
    open_gates: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """The probability that each gate is open (heads,), after learning."""
    total = sum(heads.values())
    location = (0.01 * torch.randn(total, generator=generator)).requires_grad_()
    optimiser = torch.optim.Adam([location], lr=RATE)
    for step in range(steps):
        # from all heads to the target in the first half: heads are tried in good company first
        open_now = max(open_gates, total - (total - open_gates) * 2 * (step + 1) / steps)
        centred = _centred(location, min(open_now, total - 0.5))
        noise = torch.rand(total, generator=generator).clamp(1e-6, 1 - 1e-6)
        drawn = torch.sigmoid((noise.logit() + centred) / _SOFTNESS) * (_HIGH - _LOW) + _LOW
        values = dict(
            zip(heads, drawn.clamp(0, 1).to(observer.device).split(list(heads.values())), strict=True)
        )
        number = int(torch.randint(len(batches), (1,), generator=generator))
        result = observer.gated(batches[number], values, gradients=True)
        with torch.enable_grad():
            if request.loss is None:
                value = output_distance(full[number].output, observer.output(result, full[number]))
            else:
                value = units(request.loss, result, batches[number])
            if not value.requires_grad:
                raise ValueError(
                    "model: its output has no gradient (is its forward under torch.no_grad, or quantised?); "
                    "take method='leave-one-out', which needs none"
                )
            optimiser.zero_grad()
            value.mean().backward()
        optimiser.step()
    return torch.sigmoid(_centred(location.detach(), open_gates) - _SHIFT).double()


def _centred(location: Tensor, open_gates: float) -> Tensor:
    """The locations, shifted together so that ``open_gates`` gates are open on average: the target holds
    exactly, without a penalty that would have to be weighed against the loss.

    The shift solves sum sigmoid(location - shift) = open_gates; its gradient follows from that equation.
    """
    with torch.no_grad():
        low, high = location.min() - 30, location.max() + 30
        for _ in range(60):
            shift = (low + high) / 2
            too_many = torch.sigmoid(location - shift - _SHIFT).sum() > open_gates
            low, high = torch.where(too_many, shift, low), torch.where(too_many, high, shift)
    if not location.requires_grad:
        return location - shift
    probability = torch.sigmoid(location - shift - _SHIFT)
    slope = (probability * (1 - probability)).sum().detach()
    return location - (shift + (probability.sum() - probability.sum().detach()) / slope)
