"""The method ``elimination`` of `importance`: the cost of removing heads one by one, the others refitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.common.devices import batches_to_device
from manyheads.common.interrupts import stop_if_interrupted
from manyheads.common.memory_budget import in_units, memory_budget
from manyheads.common.numbered_batches import generator_of, numbered, read_once
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import directions
from manyheads.heads.observer import Forward, Observer, differentiate, observed
from manyheads.heads.table import HeadTable
from manyheads.surgery.leaving_heads import ModuleHeads

# The ridge of the fits that are foreseen, in units of the channels' mean variance, is this times the number
# of channels over that of tokens: about what `refit` chose on held-out text of several lengths.
_RIDGE = 3.0

# Square matrices of a site's width, in float64: those that are summed up, and those that pricing makes.
_SUMMED, _PRICING = 2, 4

Price = Callable[[list[int]], float]  # of a set of heads
Order = list[tuple[float, list[int]]]  # which heads of a module leave together, and the cost of each of them


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

    The sums of a site are two square matrices of its heads' width together. Where those of all sites are more
    than ``request.memory``, the batches are read several times, for some of the modules each time.

    Examples
    --------
    >>> from torch import nn
    >>> from manyheads.heads.importance import importance
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> importance(model, [torch.randn(2, 5, 8), torch.randn(3, 7, 8)], "elimination")
    HeadTable(6 heads at 3 sites, 31 tokens: importance)
    """
    budget = memory_budget(request.memory)
    orders: dict[str, Order] = {}
    with observed(request.model) as observer:
        counts: dict[str, int] = {}
        while True:
            moments = _Moments(budget, done=set(orders))
            measure = _read(request, observer, moments)
            counts = counts or dict(observer.tokens)
            observer.tokens = dict(counts)  # of one reading
            table = observer.table({}, measure)
            orders |= _orders(table, moments.by_site)
            if not moments.left_out:
                return _ranked(table, orders)
            stop_if_interrupted()
            if read_once(request.batches):
                raise ValueError(
                    f"batches: within {in_units(budget)} of memory they are read several times; expected a "
                    "list, or more memory"
                )


def part_of_elimination(request: Request) -> dict[str, Any]:
    """What `elimination` sums over batches, of some of them: a table without numbers, and sums by site."""
    moments = _Moments(memory_budget(request.memory), done=set())
    with observed(request.model) as observer:
        measure = _read(request, observer, moments)
        if moments.left_out:
            raise ValueError(
                f"memory: the sums of elimination over a part of a text take more than "
                f"{in_units(moments.budget)}; give more, or measure the whole text in one process"
            )
        table = observer.table({}, measure)
    return {"table": table, "moments": {site: vars(each) for site, each in moments.by_site.items()}}


def joined_eliminations(table: HeadTable, parts: list[Mapping[str, Mapping[str, Any]]]) -> HeadTable:
    """The ranking by all parts of a text; ``table`` has their tokens, ``parts`` their sums by site."""
    moments: dict[str, _SiteMoments] = {}
    for part in parts:
        for site, numbers in part.items():
            moments.setdefault(site, _SiteMoments(0, int(numbers["d_value"]))).join(numbers)
    return _ranked(table, _orders(table, moments))


def _read(request: Request, observer: Observer, moments: _Moments) -> str:
    """Add up the batches. The name of what is measured."""
    measure = ""
    every = numbered(request.batches, batches_to_device(request.batches, observer.device))
    for read, (position, batch) in enumerate(every, 1):
        forward = observer.forward(batch, gradients=True)
        drawn = next(directions(forward.output, generator_of(request.seed, position)))
        _collect(forward, drawn, moments)
        measure = f"{forward.output.measure}, the rest refitted"
        request.report("elimination", read)
    return measure


class _Moments:
    """The sums of as many modules as the memory holds.

    budget: bytes.
    done: paths of modules that need none any more.
    by_site: the sums.
    left_out: paths of modules for which there was no room.
    """

    def __init__(self, budget: int, done: set[str]) -> None:
        self.budget, self.done = budget, done
        self.by_site: dict[str, _SiteMoments] = {}
        self.left_out: set[str] = set()

    def at(self, site: str, heads: int, d_value: int) -> _SiteMoments | None:
        """The sums of a site; None where they are not collected."""
        path = _path(site)
        if path in self.done or path in self.left_out:
            return None
        if site not in self.by_site:
            widths = [len(each.first) for each in self.by_site.values()] + [heads * d_value]
            needed = 8 * (_SUMMED * sum(w * w for w in widths) + _PRICING * max(widths) ** 2)
            if needed > self.budget:
                if not any(_path(other) != path for other in self.by_site):
                    raise ValueError(
                        f"memory: got {in_units(self.budget)}, and elimination needs {in_units(needed)} for "
                        f"{site!r} alone; give more, or take method='fisher'"
                    )
                self.left_out.add(path)
                self.by_site = {name: each for name, each in self.by_site.items() if _path(name) != path}
                return None
            self.by_site[site] = _SiteMoments(heads * d_value, d_value)
        return self.by_site[site]


def _path(site: str) -> str:
    """The module of a site, which may be one of its calls."""
    return site.partition("#")[0]


class _SiteMoments:
    """Sums over tokens, of the heads' outputs at one site and of the derivatives by them."""

    def __init__(self, width: int, d_value: int) -> None:
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

    def join(self, numbers: Mapping[str, Any]) -> None:
        """Add the sums of another part."""
        for name in ("tokens", "count", "first", "second", "slopes"):
            before = getattr(self, name)
            empty = isinstance(before, Tensor) and not before.numel()
            setattr(self, name, numbers[name].clone() if empty else before + numbers[name])

    def price(self) -> Price:
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


def _collect(forward: Forward, drawn: Tensor, moments: _Moments) -> None:
    """Add one batch to the sums. All sequences count alike, whatever their length."""
    outputs = [output for pieces in forward.heads.values() for output in pieces]
    slopes = iter(differentiate(forward.output.value, outputs, drawn))
    for site, pieces in forward.heads.items():
        for output in pieces:
            slope = next(slopes)
            batch, heads, queries, d_value = output.shape
            sums = moments.at(site, heads, d_value)
            if sums is None:
                continue
            real = forward.real
            if real is None or real.shape != (batch, queries):
                real = torch.ones(batch, queries, dtype=torch.bool, device=output.device)
            weights = (real / real.sum(1, keepdim=True).clamp(min=1))[real]
            rows = [torch.zeros_like(output) if x is None else x for x in (output.detach(), slope)]
            flat = [x.transpose(1, 2).flatten(2)[real] for x in rows]
            sums.add(flat[0], flat[1], weights)


def _modules(table: HeadTable) -> dict[str, ModuleHeads]:
    """The modules of a table's heads, by path."""
    sites: dict[str, list[str]] = {}
    kv_heads: dict[str, list[int]] = {}
    for row in table.rows:
        kv_heads.setdefault(row.site, []).append(row.kv_head)
    for site in kv_heads:
        sites.setdefault(_path(site), []).append(site)
    return {path: ModuleHeads(calls, kv_heads[calls[0]], set()) for path, calls in sites.items()}


def _orders(table: HeadTable, moments: dict[str, _SiteMoments]) -> dict[str, Order]:
    """In which order the heads of each module leave, for those modules whose sums are there.

    What the heads of a module cost does not depend on those of other modules.
    """
    orders: dict[str, Order] = {}
    for path, module in _modules(table).items():
        if not all(site in moments for site in module.sites):
            continue
        price = _sum_of([moments.pop(site).price() for site in module.sites])
        paid, order = 0.0, []
        while module.left:
            share, move = _next(module, price, paid)
            module.leave(move)
            paid += share * len(move)
            order.append((share, move))
        orders[path] = order
    return orders


def _sum_of(prices: list[Price]) -> Price:
    """The price of heads at all sites of a module."""
    return lambda heads: sum(price(heads) for price in prices)


def _ranked(table: HeadTable, orders: Mapping[str, Order]) -> HeadTable:
    """The cost of each head at the time it is removed, the cheapest next one of all modules first."""
    waiting = {path: list(order) for path, order in orders.items()}
    cost: dict[str, dict[int, float]] = {path: {} for path in orders}
    highest = 0.0
    while any(waiting.values()):
        path = min((path for path, order in waiting.items() if order), key=lambda path: waiting[path][0][0])
        share, move = waiting[path].pop(0)
        highest = max(highest, share)
        cost[path] |= dict.fromkeys(move, highest)
    values = torch.tensor([cost[_path(row.site)][row.head] for row in table.rows], dtype=torch.float64)
    return replace(
        table, sums={"importance": torch.stack([torch.ones_like(values), values, values.square()])}
    )


def _next(module: ModuleHeads, price: Price, paid: float) -> tuple[float, list[int]]:
    """The heads that leave a module next, and the cost of each of them."""
    removed = module.removed

    def share(move: list[int]) -> float:
        return (price(removed + move) - paid) / len(move)

    return min((share(move), move) for move in module.moves(share))
