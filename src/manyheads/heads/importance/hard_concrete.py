"""Importance by learning which heads to keep: `gates`, with hard concrete gates.

Louizos, Welling, Kingma, "Learning sparse neural networks through L0 regularization" (2018); on heads: Voita
and others, "Analyzing multi-head self-attention" (2019). Each head is multiplied by a random gate that can be
exactly 0 or 1 and still has a gradient; a target number of open gates is kept while the model, which does not
change, is asked to say what it said.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads.heads.importance.losses import units
from manyheads.heads.importance.request import Task
from manyheads.heads.model_outputs import difference
from manyheads.heads.observer import Forward, Observer, Sums, moved, observed
from manyheads.heads.table import HeadTable

STEPS, RESTARTS, RATE = 120, 3, 0.3
_SOFTNESS, _LOW, _HIGH = 2 / 3, -0.1, 1.1  # as in the literature: how a sigmoid is stretched and cut off
_SHIFT = _SOFTNESS * math.log(-_LOW / _HIGH)


def gates(task: Task, steps: int = STEPS, restarts: int = RESTARTS) -> HeadTable:
    """The probability that a head's gate is open, after learning to keep ``task.gates`` heads (half without
    it).

    What is learned against: the loss, or without one the distance from what the full model says. Every few
    steps take the next batch, round and round. Learned ``restarts`` times with other random numbers; the
    standard error is over those.
    """
    sums = Sums()
    with observed(task.model) as observer:
        batches = list(moved(task.batches, observer.device))
        full = [observer.forward(batch) for batch in batches]
        observer.check("gates", task.unverified)
        heads = {site.name: site.heads for site in observer.sites}
        keep = sum(heads.values()) // 2 if task.gates is None else task.gates
        if not 0 < keep < sum(heads.values()):
            raise ValueError(f"gates: expected 1 to {sum(heads.values()) - 1} heads, got {keep}")
        for restart in range(restarts):
            generator = torch.Generator().manual_seed(task.seed + restart)
            found = _learned(task, observer, batches, full, heads, keep, steps, generator)
            sums.add(dict(zip(heads, found.unsqueeze(0).split(list(heads.values()), 1), strict=True)))
            task.progress("gates", restart + 1, restarts)
        return observer.table(sums.found, f"probability of an open gate, {keep} of {len(found)} heads")


def _learned(
    task: Task,
    observer: Observer,
    batches: list[object],
    full: list[Forward],
    heads: dict[str, int],
    keep: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """The probability that each gate is open (heads,), after learning."""
    total = sum(heads.values())
    location = (0.01 * torch.randn(total, generator=generator)).requires_grad_()
    optimiser = torch.optim.Adam([location], lr=RATE)
    for step in range(steps):
        # from all heads to the target in the first half: heads are tried in good company first
        open_now = max(keep, total - (total - keep) * 2 * (step + 1) / steps)
        centred = _centred(location, min(open_now, total - 0.5))
        noise = torch.rand(total, generator=generator).clamp(1e-6, 1 - 1e-6)
        drawn = torch.sigmoid((noise.logit() + centred) / _SOFTNESS) * (_HIGH - _LOW) + _LOW
        values = dict(
            zip(heads, drawn.clamp(0, 1).to(observer.device).split(list(heads.values())), strict=True)
        )
        number = int(torch.randint(len(batches), (1,), generator=generator))
        result = observer.gated(batches[number], values, gradients=True)
        with torch.enable_grad():
            if task.loss is None:
                value = difference(full[number].output, observer.output(result, full[number]))
            else:
                value = units(task.loss, result, batches[number])
            if not value.requires_grad:
                raise ValueError(
                    "model: its output has no gradient (is its forward under torch.no_grad, or quantised?); "
                    "take method='leave-one-out', which needs none"
                )
            optimiser.zero_grad()
            value.mean().backward()
        optimiser.step()
    return torch.sigmoid(_centred(location.detach(), keep) - _SHIFT).double()


def _centred(location: Tensor, keep: float) -> Tensor:
    """The same, shifted together so that ``keep`` gates are open on average: the target is kept exactly, by
    no penalty that would have to be weighed against the loss.

    The shift solves sum sigmoid(location - shift) = keep; its gradient follows from that equation.
    """
    with torch.no_grad():
        low, high = location.min() - 30, location.max() + 30
        for _ in range(60):
            shift = (low + high) / 2
            many = torch.sigmoid(location - shift - _SHIFT).sum() > keep
            low, high = torch.where(many, shift, low), torch.where(many, high, shift)
    if not location.requires_grad:
        return location - shift
    probability = torch.sigmoid(location - shift - _SHIFT)
    slope = (probability * (1 - probability)).sum().detach()
    return location - (shift + (probability.sum() - probability.sum().detach()) / slope)
