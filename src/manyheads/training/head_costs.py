"""What heads are worth at a moment of training: a look at recent batches, with heads and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.site import Site
from manyheads.common.devices import in_float64
from manyheads.common.preserved_state import evaluating
from manyheads.common.processes import gathered_in_group
from manyheads.heads.silence import silence
from manyheads.training.head_monitor import DEAD, TOKENS, twins

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Cost:
    """By how much the loss grows without some heads: the mean over batches and its standard error.

    >>> str(Cost(0.00031, 0.0011))
    '0.00031 +- 0.0011'
    """

    mean: float
    error: float

    @property
    def most(self) -> float:
        """What it may well be."""
        return self.mean + self.error

    @property
    def least(self) -> float:
        return self.mean - self.error

    def __str__(self) -> str:
        return f"{self.mean:.2g} +- {self.error:.2g}"


@dataclass
class HeadObservation:
    """What one pass over some batches shows.

    sites: by name.
    losses: (batches,) of the model as it is, of all processes.
    scores: {site: (heads,)}: the mean over batches of the sum over sequences of |d loss / d gate|.
    influence: {site: (heads,)}: the sum over tokens of |output| |gradient|.
    redundancy: {site: (heads,)}: the largest CKA with another head of the site.
    """

    sites: dict[str, Site]
    losses: Tensor
    scores: dict[str, Tensor]
    influence: dict[str, Tensor]
    redundancy: dict[str, Tensor]

    def dead(self, site: str) -> Tensor:
        """(heads,): whether each has next to no influence on the loss."""
        influence = self.influence[site]
        return influence <= DEAD * influence.mean()


@dataclass
class _Outputs:
    """The outputs of the heads in one forward pass."""

    heads: dict[str, list[Tensor]] = field(default_factory=dict)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)  # (tokens, heads, d_value) of some tokens

    def see(self, call: Call) -> Tensor | None:
        if call.again or call.partial:
            return None
        output = call.output
        with torch._C.DisableTorchFunction():
            if not output.requires_grad:
                output = output.detach().requires_grad_()  # nothing before it has a gradient
            rows = output.detach().transpose(1, 2).flatten(0, 1)
            rows = rows[rows.flatten(1).any(1)]  # padding gives zeros
            self.rows.setdefault(call.site.name, []).append(_sample_rows(rows).cpu())
            self.heads.setdefault(call.site.name, []).append(output)
            return output.clone()  # a model may change what it gets in place


def _sample_rows(rows: Tensor) -> Tensor:
    return rows[:: max(len(rows) // TOKENS, 1)][:TOKENS]


def observe_heads(model: nn.Module, loss: Loss, batches: Sequence[object]) -> HeadObservation:
    """Run a model on batches, in eval mode, and differentiate the loss by the outputs of its heads.

    >>> import manyheads as mh
    >>> model, ids = mh.Encoder(12, heads=3, layers=2, vocabulary=97), torch.randint(97, (2, 11))
    >>> seen = observe_heads(model, lambda model, ids: model(ids).square().mean(), [ids])
    >>> {site: scores.shape for site, scores in seen.scores.items()}
    {'blocks.0.attention': torch.Size([3]), 'blocks.1.attention': torch.Size([3])}
    """
    losses: list[float] = []
    scores: dict[str, Tensor] = {}
    influence: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    outputs = _Outputs()
    with evaluating(model), Interceptor(model, lambda call: outputs.see(call)) as interceptor:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for batch in batches:
            outputs = _Outputs()
            with torch.enable_grad():
                value = loss(model, batch)
            if not outputs.heads:
                raise ValueError(
                    "model: no attention was seen in it; expected a transformer made of torch functions"
                )
            _add(value, outputs, scores, influence)
            losses.append(float(value.detach()))
            for name, site_rows in outputs.rows.items():
                rows.setdefault(name, []).extend(site_rows)
    sites = {site.name: site for site in interceptor.sites.by_name.values() if site.name in scores}
    similar = {name: twins(_sample_rows(torch.cat(rows[name])))[0] for name in sites}
    return HeadObservation(
        sites,
        _gather_values(losses),
        _mean({name: scores[name] / len(batches) for name in sites}),
        _mean({name: influence[name] for name in sites}),
        _mean(similar),
    )


def _add(value: Tensor, outputs: _Outputs, scores: dict[str, Tensor], influence: dict[str, Tensor]) -> None:
    """Add one batch to the sums."""
    if value.dim() or not value.requires_grad:
        raise ValueError(
            f"loss: expected a function (model, batch) that returns one number with a gradient, got "
            f"{tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
        )
    pairs = [(name, output) for name, pieces in outputs.heads.items() for output in pieces]
    gradients = torch.autograd.grad(value, [output for _, output in pairs], allow_unused=True)
    for (name, output), gradient in zip(pairs, gradients, strict=True):
        o = output.detach().float()
        g = torch.zeros_like(o) if gradient is None else gradient.float()
        gates = (g * o).sum((2, 3)).abs().sum(0)  # (batch, heads) -> (heads,)
        sizes = (g.norm(dim=-1) * o.norm(dim=-1)).sum((0, 2))
        for sums, part in ((scores, gates), (influence, sizes)):
            part = part.double().cpu()
            sums[name] = sums[name] + part if name in sums else part


def losses_without(
    model: nn.Module, loss: Loss, batches: Sequence[object], heads: Mapping[str, list[int]]
) -> Tensor:
    """The loss of each batch with some heads silenced, (batches,), of all processes."""
    with evaluating(model), torch.no_grad(), silence(model, heads) if heads else nullcontext():
        values = [float(loss(model, batch)) for batch in batches]
    return _gather_values(values)


def _gather_values(values: list[float]) -> Tensor:
    """The values of all processes."""
    return torch.tensor([value for part in gathered_in_group(values) for value in part], dtype=torch.float64)


def cost(without: Tensor, losses: Tensor) -> Cost:
    """The cost of heads, from the losses of the same batches without and with them.

    >>> cost(torch.tensor([2.25, 3.5]), torch.tensor([2.0, 3.0])).mean
    0.375
    """
    difference = in_float64(without - losses)
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.inf
    return Cost(difference.mean().item(), error)


def noise(losses: Sequence[float]) -> float:
    """The standard error of the mean of training losses: from the differences of neighbours, so that a loss
    that falls steadily does not count as one that varies.

    >>> noise([3.0, 2.0, 1.0, 0.0]) < noise([3.0, 0.0, 2.0, 1.0])
    True
    """
    values = torch.tensor(losses, dtype=torch.float64)
    if len(values) < 2:
        return 0.0
    changes = values.diff()
    centred = changes - changes.mean() if len(changes) > 1 else changes
    return (centred.square().mean() / 2 / len(values)).sqrt().item()


def _mean(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over processes."""
    everywhere = gathered_in_group(values)
    if len(everywhere) == 1:
        return values
    return {name: torch.stack([one[name] for one in everywhere]).mean(0) for name in values}
