"""How many heads there may be at each step, and which heads can only go together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from manyheads.capture.site import Site
from manyheads.surgery.arrangement import groups_of


@dataclass(frozen=True)
class Unit:
    """Heads that go together: one head, or a group that shares a key head, in all calls of its module.

    >>> Unit(("h.0.attn",), (2, 3)).heads
    {'h.0.attn': [2, 3]}
    """

    sites: tuple[str, ...]
    numbers: tuple[int, ...]

    @property
    def site(self) -> str:
        return self.sites[0]

    @property
    def size(self) -> int:
        return len(self.numbers)

    @property
    def heads(self) -> dict[str, list[int]]:
        """As `silence` and `cut` take them."""
        return {site: list(self.numbers) for site in self.sites}


def units_of(sites: Mapping[str, Site]) -> dict[str, list[Unit]]:
    """The units of a model, by the first site of their module.

    >>> site = Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1))
    >>> [unit.numbers for unit in units_of({"attn": site})["attn"]]
    [(0, 1), (2, 3)]
    """
    by_path: dict[str, list[Site]] = {}
    for site in sites.values():
        by_path.setdefault(site.path, []).append(site)
    units: dict[str, list[Unit]] = {}
    for calls in by_path.values():
        groups = groups_of(calls[0])
        if len(groups) == 1:  # all share one key head: each can go by itself
            groups = [[head] for head in range(calls[0].heads)]
        names = tuple(site.name for site in calls)
        units[names[0]] = [Unit(names, tuple(group)) for group in groups]
    return units


def joint_heads(units: Iterable[Unit]) -> dict[str, list[int]]:
    """The heads of several units.

    >>> joint_heads([Unit(("a",), (2,)), Unit(("a",), (0,)), Unit(("b",), (1,))])
    {'a': [0, 2], 'b': [1]}
    """
    heads: dict[str, list[int]] = {}
    for unit in units:
        for site, numbers in unit.heads.items():
            heads[site] = sorted([*heads.get(site, []), *numbers])
    return heads


@dataclass(frozen=True)
class Budget:
    """The number of heads at the start and at the end, and the steps between which it changes, evenly.

    >>> budget = Budget(before=8, after=4, first=10, last=50)
    >>> [budget.at(step) for step in (0, 10, 30, 50, 99)]
    [8, 8, 6, 4, 4]
    """

    before: int
    after: int
    first: int
    last: int

    def at(self, step: int) -> int:
        """The largest number of heads after a step."""
        done = (step - self.first) / max(self.last - self.first, 1)
        return round(self.before + (self.after - self.before) * min(max(done, 0.0), 1.0))


def budget(
    heads: float,
    units: Mapping[str, list[Unit]],
    most: Mapping[str, int],
    fixed: Collection[str],
    steps: range,
) -> Budget:
    """The budget that ends with a number of heads, or with a share of those that there are.

    Parameters
    ----------
    heads: a whole number of heads, or a share as a float.
    units: of the model, by site.
    most: the largest number of heads of each site.
    fixed: sites that cannot change.
    steps: the first and the last step of the schedule.

    Raises
    ------
    ValueError for a number that leaves a site without heads, or that the widths do not allow.
    """
    before = sum(unit.size for of_site in units.values() for unit in of_site)
    after = heads if isinstance(heads, int) else round(heads * before)
    fewest = sum(
        sum(unit.size for unit in of_site) if name in fixed else of_site[0].size
        for name, of_site in units.items()
    )
    largest = sum(most.values())
    asked = f"{after}" if isinstance(heads, int) else f"{heads:g} of {before} heads is {after}, which"
    if after < fewest:
        raise ValueError(
            f"heads: {asked} cannot be met: each of the {len(units)} attention modules keeps at least one "
            f"head, or group of heads; expected from {fewest} to {largest} heads"
        )
    if after > largest:
        raise ValueError(
            f"heads: {asked} is more than the widths allow: a site has room for as many heads as d_key goes "
            f"into the width it reads; expected from {fewest} to {largest} heads"
        )
    return Budget(before, after, steps.start, steps.stop)
