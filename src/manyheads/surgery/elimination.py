"""The method ``elimination`` of `importance`: the cost of removing heads one by one, the others refitted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.capture.site import Site
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import directions
from manyheads.heads.observer import Forward, Sums, differentiate, moved, observed
from manyheads.heads.table import HeadTable
from manyheads.surgery.leaving_heads import ModuleHeads

# The ridge of the fits that are foreseen, in units of the channels' mean variance, is this times the number
# of channels over that of tokens: about what `refit` chose on held-out text of several lengths.
_RIDGE = 3.0


def elimination(request: Request) -> HeadTable:
    """The cost of each head at the time it is removed, with the remaining heads refitted.

    A head that others can stand in for matters little, however strong it is, until those others are gone. So
    heads are removed one after the other, always the one that costs least, and a head's importance is what it
    cost when its turn came (no less than those before it, so that ranking by importance is this order).

    What a set of heads costs is known without refitting. Let o be the outputs of all heads of a site at a
    token, C their covariance over tokens, P its inverse, and g the derivative of the model's output by o. Of
    the removed heads r, the others explain all but the covariance inv(P_rr), and what is not explained moves
    the model's output by the mean of (g_r . rest)^2 = trace(E[g_r g_r'] inv(P_rr)). One backward pass
    collects C and E[g g'] for all sites. A ridge on C accounts for how much of that a refit can learn from
    the tokens that there are.

    Examples
    --------
    >>> from torch import nn
    >>> from manyheads.heads.importance import importance
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> importance(model, [torch.randn(2, 5, 8), torch.randn(3, 7, 8)], "elimination")
    HeadTable(6 heads at 3 sites, 31 tokens: importance)
    """
    generator = torch.Generator().manual_seed(request.seed)
    moments: dict[str, _Moments] = {}
    with observed(request.model) as observer:
        for number, batch in enumerate(moved(request.batches, observer.device), 1):
            forward = observer.forward(batch, gradients=True)
            _collect(forward, next(directions(forward.output, generator)), moments)
            request.report("elimination", number)
        sums = Sums()
        costs = _costs(observer.sites, moments)
        sums.add(
            {
                site: torch.tensor([[by_head[head] for head in sorted(by_head)]])
                for site, by_head in costs.items()
            }
        )
        return observer.table(sums.by_column, f"{forward.output.measure}, the rest refitted")


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
        """Add tokens (rows, heads * d_value), each with its weight (rows,)."""
        outputs, slopes, weights = (x.cpu().double() for x in (outputs, slopes, weights))
        weighted = outputs * weights.unsqueeze(1)
        self.tokens += len(outputs)
        self.count += weights.sum().item()
        self.first += weighted.sum(0)
        self.second += outputs.T @ weighted
        self.slopes += slopes.T @ slopes

    def price(self) -> Callable[[list[int]], float]:
        """The cost of a set of heads when the others are refitted."""
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
    """Add one batch to the sums. All sequences count alike, whatever their length."""
    outputs = [output for pieces in forward.heads.values() for output in pieces]
    slopes = iter(differentiate(forward.output.value, outputs, drawn))
    for site, pieces in forward.heads.items():
        for output in pieces:
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
    """The cost of each head at the time it is removed, by site."""
    paths: dict[str, list[Site]] = {}
    for site in sites:
        paths.setdefault(site.path, []).append(site)
    modules = [
        ModuleHeads([site.name for site in calls], list(calls[0].kv_heads), set()) for calls in paths.values()
    ]
    prices = []
    for module in modules:
        each = [moments[name].price() for name in module.sites]
        prices.append(lambda heads, each=each: sum(price(heads) for price in each))
    paid = [0.0 for _ in modules]
    turns = {i: _next(module, prices[i], 0.0) for i, module in enumerate(modules)}
    cost: dict[str, dict[int, float]] = {site.name: {} for site in sites}
    highest = 0.0
    while turns:
        i = min(turns, key=lambda i: turns[i][0])
        share, move = turns.pop(i)
        highest = max(highest, share)
        for name in modules[i].sites:
            cost[name] |= dict.fromkeys(move, highest)
        modules[i].leave(move)
        paid[i] += share * len(move)
        if modules[i].left:
            turns[i] = _next(modules[i], prices[i], paid[i])
    return cost


def _next(module: ModuleHeads, price: Callable[[list[int]], float], paid: float) -> tuple[float, list[int]]:
    """The heads that leave a module next, and the cost of each of them."""
    removed = module.removed

    def share(move: list[int]) -> float:
        return (price(removed + move) - paid) / len(move)

    return min((share(move), move) for move in module.moves(share))
