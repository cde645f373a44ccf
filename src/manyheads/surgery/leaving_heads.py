"""How heads leave the modules of a model: in sets that keep groups equal, the least important first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manyheads.surgery.prices import HeadPrices


class ModuleHeads:
    """The heads of one module, in groups that share a key head, as they leave.

    sites: the sites that are calls of it.
    kv_heads: the key head of each head.
    protected: the heads that stay.

    Examples
    --------
    >>> module = ModuleHeads(["attn"], [0, 0, 1, 1], protected={3})
    >>> module.moves(lambda heads: -sum(heads))                    # a whole group, or one head of each
    [[0, 1], [1, 2]]
    >>> module.leave([1, 2]); module.groups, module.removed
    ([[0], [3]], [1, 2])
    """

    def __init__(self, sites: list[str], kv_heads: list[int], protected: set[int]) -> None:
        self.sites, self.protected, self.size = sites, protected, len(kv_heads)
        self.groups = [[h for h in range(self.size) if kv_heads[h] == kv] for kv in sorted(set(kv_heads))]

    @property
    def left(self) -> int:
        """How many heads are left."""
        return sum(map(len, self.groups))

    @property
    def removed(self) -> list[int]:
        """The heads that left."""
        return sorted(set(range(self.size)) - {head for group in self.groups for head in group})

    def moves(self, price: Callable[[list[int]], float]) -> list[list[int]]:
        """Sets of heads that may leave next: the cheapest whole group, the cheapest head of every group."""
        groups = [group for group in self.groups if not self.protected & set(group)]
        moves = [min(groups, key=price)] if groups else []
        if self.groups and len(self.groups[0]) > 1:
            free = [[head for head in group if head not in self.protected] for group in self.groups]
            if all(free):
                moves.append([min(group, key=lambda head: price([head])) for group in free])
        return moves

    def leave(self, heads: list[int]) -> None:
        """Remove heads."""
        self.groups = [[head for head in group if head not in heads] for group in self.groups]
        self.groups = [group for group in self.groups if group]


class WholeGroups(ModuleHeads):
    """Heads that leave by whole groups only."""

    @staticmethod
    def of(module: ModuleHeads) -> WholeGroups:
        """The same heads."""
        same = WholeGroups(module.sites, [0] * module.size, module.protected)
        same.groups = module.groups
        return same

    def moves(self, price: Callable[[list[int]], float]) -> list[list[int]]:
        """The cheapest whole group."""
        return [move for move in super().moves(price) if move in self.groups]


def remove_least_important(
    modules: list[ModuleHeads], importance: dict[str, list[float]], count: int, floor: int
) -> None:
    """Remove at most ``count`` heads from the modules, the least important first."""
    while True:
        moves = []
        for i, module in enumerate(modules):

            def price(heads: list[int], module: ModuleHeads = module) -> float:
                return sum(importance[site][head] for site in module.sites for head in heads) / len(heads)

            moves += [
                (price(move), i, move)
                for move in module.moves(price)
                if len(move) <= count and module.left - len(move) >= floor
            ]
        if not moves:
            return
        _, i, move = min(moves)
        modules[i].leave(move)
        count -= len(move)


def remove_for(
    modules: list[ModuleHeads],
    importance: Mapping[str, list[float]],
    save: Mapping[str, float],
    prices: HeadPrices,
    floor: int,
) -> None:
    """Remove heads from the modules until these shares are saved: at each step those that lose the least
    importance for what they save of what is still missing.
    """
    while True:
        removed = {site: module.removed for module in modules for site in module.sites}
        shares = {what: prices.share(what, removed) for what in save}
        missing = {what: save[what] - share for what, share in shares.items() if share < save[what] - 1e-9}
        if not missing:
            return
        moves = []
        for i, module in enumerate(modules):

            def price(heads: list[int], module: ModuleHeads = module) -> float:
                return sum(importance[site][head] for site in module.sites for head in heads)

            for move in module.moves(price):
                if module.left - len(move) < floor:
                    continue
                removed_then = removed | {site: [*module.removed, *move] for site in module.sites}
                saved = sum(
                    min(prices.share(what, removed_then) - shares[what], shortfall) / shortfall
                    for what, shortfall in missing.items()
                )
                if saved > 0:
                    moves.append((price(move) / saved, i, move))
        if not moves:
            what = next(iter(missing))
            raise ValueError(
                f"save: {what} can be lowered by at most {shares[what]:.1%} by removing heads, and "
                f"{save[what]:.1%} was asked for; choose a smaller share, a lower floor, or protect less"
            )
        _, i, move = min(moves)
        modules[i].leave(move)
