"""elimination: rank heads by what is lost when they go, one after the other, and the rest is refitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.heads.model_outputs import directions
from manyheads.heads.observer import Forward, moved, observed
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import fingerprint, labels_of, rows_of
from manyheads.surgery.plan import ModuleHeads

# The ridge of the fits that are foreseen, in units of the channels' mean variance, is this times the number
# of channels over that of tokens: about what `refit` chose on held-out text of several lengths.
_RIDGE = 3.0


def elimination(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    seed: int = 0,
    step: Callable[[float], None] = lambda share: None,
) -> HeadTable:
    """How much each head matters when those that stay are refitted: a table with the column ``importance``.

    A head that others can stand in for matters little, however strong it is, until those others are gone. So
    heads are removed one after the other, always the one that costs least, and a head's importance is what it
    cost when its turn came (no less than those before it, so that ranking by importance is this order).

    What a set of heads costs is known without refitting. Let o be the outputs of all heads of a site at a
    token, C their covariance over tokens, P its inverse, and g the derivative of the model's output by o. Of
    the removed heads r, the others explain all but the covariance inv(P_rr), and what is not explained moves
    the model's output by the mean of (g_r . rest)^2 = trace(E[g_r g_r'] inv(P_rr)). One backward pass
    collects C and E[g g'] for all sites. A ridge on C says how much of that a refit can really learn from so
    few tokens.

    Parameters
    ----------
    model: any torch.nn.Module; it runs in eval mode, and nothing about it changes.
    batches: dicts, tuples or tensors, as the model takes them; no labels are needed.
    seed: of the random directions of the output that are followed back.
    step: told the share that is done, when the number of batches is known.

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> table = elimination(model, [torch.randn(2, 5, 8), torch.randn(3, 7, 8)])
    >>> table
    HeadTable(6 heads at 3 sites, 31 tokens: importance)
    """
    batches = list(batches)
    generator = torch.Generator().manual_seed(seed)
    moments: dict[str, _Moments] = {}
    with observed(model) as observer:
        for number, batch in enumerate(moved(batches, observer.device)):
            forward = observer.forward(batch, gradients=True)
            _collect(forward, next(directions(forward.output, generator)), moments)
            step((number + 1) / len(batches))
        sites = observer.sites
        tokens = [observer.tokens.get(site.name, 0) for site in sites for _ in range(site.heads)]
    cost = _costs(sites, moments)
    values = torch.tensor([cost[site.name][head] for site in sites for head in range(site.heads)])
    sums = torch.stack([torch.ones_like(values), values, values.square()])
    rows, labels = rows_of(model, sites), labels_of(sites)
    return HeadTable(rows, torch.tensor(tokens), {"importance": sums}, fingerprint(model), labels=labels)


class _Moments:
    """Sums over tokens, of the heads' outputs at one site and of the derivatives by them."""

    def __init__(self, heads: int, d_value: int) -> None:
        width = heads * d_value
        self.d_value = d_value
        self.tokens, self.count = 0, 0.0
        self.first = torch.zeros(width, dtype=torch.float64)
        self.second = torch.zeros(width, width, dtype=torch.float64)
        self.slopes = torch.zeros(width, width, dtype=torch.float64)

    def add(self, outputs: Tensor, slopes: Tensor, weights: Tensor) -> None:
        """Count tokens (rows, heads * d_value), each as much as its weight (rows,)."""
        outputs, slopes, weights = (x.cpu().double() for x in (outputs, slopes, weights))
        weighted = outputs * weights.unsqueeze(1)
        self.tokens += len(outputs)
        self.count += weights.sum().item()
        self.first += weighted.sum(0)
        self.second += outputs.T @ weighted
        self.slopes += slopes.T @ slopes

    def price(self) -> Callable[[list[int]], float]:
        """What a set of heads costs when the others are refitted."""
        mean = self.first / self.count
        covariance = self.second / self.count - mean.outer(mean)
        strength = _RIDGE * len(mean) / self.tokens * covariance.diagonal().mean().clamp(min=1e-30)
        ridge = strength * torch.eye(len(mean), dtype=torch.float64)
        inverse = torch.linalg.inv(covariance + ridge)
        each = torch.arange(len(mean)).view(-1, self.d_value)

        def price(heads: list[int]) -> float:
            r = each[heads].flatten()
            rest = torch.linalg.inv(inverse[r][:, r]) - ridge[r][:, r]
            return float((self.slopes[r][:, r] * rest).sum() / 2)

        return price


def _collect(forward: Forward, drawn: Tensor, moments: dict[str, _Moments]) -> None:
    """Sum up one batch. Each sequence counts alike, however long it is."""
    outputs = [output for found in forward.heads.values() for output in found]
    slopes = iter(torch.autograd.grad(forward.output.value, outputs, drawn, allow_unused=True))
    for site, found in forward.heads.items():
        for output in found:
            slope = next(slopes)
            batch, heads, queries, d_value = output.shape
            real = forward.real
            if real is None or real.shape != (batch, queries):
                real = torch.ones(batch, queries, dtype=torch.bool, device=output.device)
            weights = (real / real.sum(1, keepdim=True).clamp(min=1))[real]
            rows = [torch.zeros_like(output) if x is None else x for x in (output.detach(), slope)]
            flat = [x.transpose(1, 2).flatten(2)[real] for x in rows]
            moments.setdefault(site, _Moments(heads, d_value)).add(flat[0], flat[1], weights)


def _costs(sites: list[Site], moments: dict[str, _Moments]) -> dict[str, dict[int, float]]:
    """What each head costs when its turn comes, by site."""
    paths: dict[str, list[Site]] = {}
    for site in sites:
        paths.setdefault(site.path, []).append(site)
    places = [
        ModuleHeads([site.name for site in calls], list(calls[0].kv_heads), set()) for calls in paths.values()
    ]
    prices = []
    for place in places:
        each = [moments[name].price() for name in place.sites]
        prices.append(lambda heads, each=each: sum(price(heads) for price in each))
    paid = [0.0 for _ in places]
    turns = {i: _next(place, prices[i], 0.0) for i, place in enumerate(places)}
    cost: dict[str, dict[int, float]] = {site.name: {} for site in sites}
    highest = 0.0
    while turns:
        i = min(turns, key=lambda i: turns[i][0])
        share, move = turns.pop(i)
        highest = max(highest, share)
        for name in places[i].sites:
            cost[name] |= dict.fromkeys(move, highest)
        places[i].leave(move)
        paid[i] += share * len(move)
        if places[i].left:
            turns[i] = _next(places[i], prices[i], paid[i])
    return cost


def _next(place: ModuleHeads, price: Callable[[list[int]], float], paid: float) -> tuple[float, list[int]]:
    """The heads that leave a place next, and what each of them costs."""
    gone = place.removed

    def share(move: list[int]) -> float:
        return (price(gone + move) - paid) / len(move)

    return min((share(move), move) for move in place.moves(share))
