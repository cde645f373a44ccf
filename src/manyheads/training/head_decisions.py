"""Which heads to cut, to begin anew, to split and to add: decisions from prices, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manyheads.training.head_budget import Unit
from manyheads.training.head_costs import Cost, HeadObservation

TWINS = 0.95  # a head whose outputs have this CKA with those of another head of its site says the same
PACE = 4  # of this many heads at most one is cut at a time because it costs nothing
MORE = 2  # this many heads are priced beyond those that may go
SATURATED = 2.0  # a site is saturated if its cheapest head costs this many times the noise
LOADED = 2.0  # a head with this many times the mean influence of its site is split; else one is added

Price = Callable[[Sequence[Unit]], Cost]


@dataclass
class Limits:
    """What is allowed at a moment.

    allowed: heads in the whole model now; after: at the end.
    most: heads of each site.
    fixed: sites that cannot change.
    young: units that began a short time ago.
    last: whether this is the last chance to meet the budget.
    """

    allowed: int
    after: int
    most: Mapping[str, int]
    fixed: frozenset[str] = frozenset()
    young: frozenset[Unit] = frozenset()
    last: bool = False


@dataclass
class Decisions:
    """Units with the reason for each; growth is ``split`` or ``add``, of or beside a unit."""

    cut: list[tuple[Unit, str]] = field(default_factory=list)
    anew: list[tuple[Unit, str]] = field(default_factory=list)
    grow: list[tuple[Unit, str, str]] = field(default_factory=list)


@dataclass
class Moment:
    """What is measured when decisions are made."""

    seen: HeadObservation
    units: Mapping[str, list[Unit]]
    limits: Limits
    noise: float
    price: Price

    def __post_init__(self) -> None:
        self.alive = sum(unit.size for of_site in self.units.values() for unit in of_site)
        self._prices: dict[Unit, Cost] = {}

    def score(self, unit: Unit) -> float:
        return float(sum(self.seen.scores[site][list(unit.numbers)].sum() for site in unit.sites))

    def cost(self, unit: Unit) -> Cost:
        """What removing a unit costs; measured once."""
        if unit not in self._prices:
            self._prices[unit] = self.price([unit])
        return self._prices[unit]

    def free(self, cost: Cost) -> bool:
        return cost.most < self.noise

    def removable(self) -> list[Unit]:
        """Units that may go, those of least influence first; each site keeps some."""
        chosen: list[Unit] = []
        for name, of_site in self.units.items():
            if name in self.limits.fixed:
                continue
            left = len(of_site) - 1
            cap = left if self.limits.last else min(max(len(of_site) // 2, 1), left)
            old = [unit for unit in of_site if self.limits.last or unit not in self.limits.young]
            chosen += sorted(old, key=self.score)[:cap]
        return sorted(chosen, key=self.score)

    def why(self, cost: Cost) -> str:
        return f"costs {cost}; the loss varies by {self.noise:.2g}"


def decide(now: Moment) -> Decisions:
    """What to change."""
    decisions = Decisions(cut=_cuts(now))
    left = now.alive - sum(unit.size for unit, _ in decisions.cut)
    if not decisions.cut and left >= now.limits.after:
        _exchange(now, decisions)
    elif left < min(now.limits.allowed, now.limits.after):
        _growth(now, decisions, min(now.limits.allowed, now.limits.after) - left)
    _reseeds(now, decisions)
    return decisions


def _cuts(now: Moment) -> list[tuple[Unit, str]]:
    """The cheapest units that there is no room for, and those that cost less than the noise."""
    limits = now.limits
    forced = max(now.alive - limits.allowed, 0)
    spare = max(min(now.alive // PACE, now.alive - limits.after), 0)
    candidates: list[Unit] = []
    for unit in now.removable():
        if sum(other.size for other in candidates) < max(forced, spare) + MORE * (max(forced, spare) > 0):
            candidates.append(unit)
    by_cost = sorted(candidates, key=lambda unit: now.cost(unit).mean)
    over_budget: list[Unit] = []
    free_units: list[Unit] = []
    for unit in by_cost:
        removed_count = sum(other.size for other in over_budget + free_units)
        if removed_count < forced:
            over_budget.append(unit)
        elif removed_count + unit.size <= spare and now.free(now.cost(unit)):
            free_units.append(unit)
    free_units = _keep_jointly_free(now, over_budget, free_units)
    budget = f"the budget is {limits.allowed} heads of {now.alive}"
    return [(unit, f"removing it {now.why(now.cost(unit))}") for unit in free_units] + [
        (unit, f"removing it {now.why(now.cost(unit))}; {budget}") for unit in over_budget
    ]


def _keep_jointly_free(now: Moment, over_budget: list[Unit], free_units: list[Unit]) -> list[Unit]:
    """Of units that cost nothing one by one, as many as cost nothing together."""
    base_cost = now.price(over_budget).mean if over_budget and len(free_units) > 0 else 0.0
    while len(free_units) > 1 or (free_units and over_budget):
        joint_cost = now.price([*over_budget, *free_units])
        if now.free(Cost(joint_cost.mean - base_cost, joint_cost.error)):
            break
        free_units = free_units[: len(free_units) // 2]
    return free_units


def _exchange(now: Moment, decisions: Decisions) -> None:
    """Move a head from where it costs nothing to a site that is saturated."""
    if now.alive > now.limits.allowed:
        return
    for unit in now.removable()[:1]:
        if now.free(now.cost(unit)):
            _growth(now, decisions, unit.size, besides=unit.site)
            if decisions.grow:
                decisions.cut.append((unit, f"removing it {now.why(now.cost(unit))}; its room is needed"))


def _growth(now: Moment, decisions: Decisions, room: int, besides: str = "") -> None:
    """Add or split heads at the most loaded sites, if those are saturated."""
    losing = {unit.site for unit, _ in decisions.cut} | {besides}
    sites = []
    for name, of_site in now.units.items():
        size = sum(unit.size for unit in of_site) + of_site[0].size
        young = any(unit in now.limits.young for unit in of_site)
        if not (name in losing or name in now.limits.fixed or young or size > now.limits.most[name]):
            sites.append((min(map(now.score, of_site)), name))
    for _, name in sorted(sites, reverse=True)[:MORE]:
        of_site = now.units[name]
        if of_site[0].size > room:
            continue
        least = min(of_site, key=now.score)
        cost = now.cost(least)
        if cost.least <= SATURATED * now.noise:
            break  # those that follow are less loaded
        top = max(of_site, key=now.score)
        share = now.score(top) / max(sum(map(now.score, of_site)), 1e-300)
        numbers = ", ".join(map(str, least.numbers))
        reason = f"every head here matters: removing the least of them ({numbers}) {now.why(cost)}"
        loaded = share * len(of_site) > LOADED
        if loaded:
            reason += f"; head {', '.join(map(str, top.numbers))} has {share:.0%} of the influence"
        decisions.grow.append((top, "split" if loaded else "add", reason))
        room -= of_site[0].size


def _reseeds(now: Moment, decisions: Decisions) -> None:
    """Of each site at most one unit that is dead, or the twin of another, and costs nothing."""
    busy = {unit.site for unit, _ in decisions.cut} | {unit.site for unit, _, _ in decisions.grow}
    for name, of_site in now.units.items():
        if name in busy or name in now.limits.fixed or len(of_site) < 2:
            continue
        dead, twin = now.seen.dead(name), now.seen.redundancy[name] >= TWINS
        ranked = sorted(of_site, key=now.score)[:-1]
        for unit in ranked:
            heads = list(unit.numbers)
            if unit in now.limits.young or not bool((dead | twin)[heads].all()):
                continue
            cost = now.cost(unit)
            if now.free(cost):
                similar = float(now.seen.redundancy[name][heads].min())
                what = (
                    "it is dead"
                    if bool(dead[heads].all())
                    else f"another head says the same (CKA {similar:.2f})"
                )
                decisions.anew.append((unit, f"{what}; removing it {now.why(cost)}"))
            break
