"""Arrangements: which heads of a model a changed one has, those that go and those that are there twice.

`cut` and `grow` are one change: entries of weights, settings and inputs are chosen by index. What belongs to
heads that go is left out, and what belongs to heads that are copied comes twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from manyheads.capture.site import Site

User = TypeVar("User", bound=Hashable)
Copies = tuple[frozenset[int], ...]  # heads that are copied together, a set for each time

# For messages: what the changed model is called, and what it is compared with.
_RESULTS = {"cut": "cut", "grow": "grown", "merge": "merged"}
_EXPECTED = {
    "cut": "the silenced one",
    "grow": "the model as it was",
    "merge": "the one whose key heads are equal",
}


@dataclass(frozen=True)
class Arrangement:
    """What becomes of the heads of a model.

    sites: by name.
    removed: ``{site: heads}`` that go.
    copied: ``{site: sets of heads}`` that are there once more, set by set. A key head is copied with the
        whole group that reads it.
    merged: ``{site: key heads}`` that go while the heads that read them stay, and read another one.

    Examples
    --------
    >>> site = Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1))
    >>> smaller = Arrangement("cut", {"attn": site}, removed={"attn": [0, 1]})
    >>> smaller.heads("attn"), smaller.key_heads("attn")
    ([2, 3], [1])
    >>> larger = Arrangement("grow", {"attn": site}, copied={"attn": (frozenset({2, 3}),)})
    >>> larger.heads("attn"), larger.key_heads("attn")
    ([0, 1, 2, 3, 2, 3], [0, 1, 1])
    >>> shared = Arrangement("merge", {"attn": site}, merged={"attn": [1]})
    >>> shared.heads("attn"), shared.key_heads("attn")
    ([0, 1, 2, 3], [0])
    """

    verb: Literal["cut", "grow", "merge"]
    sites: Mapping[str, Site]
    removed: Mapping[str, list[int]] = field(default_factory=dict)
    copied: Mapping[str, Copies] = field(default_factory=dict)
    merged: Mapping[str, list[int]] = field(default_factory=dict)

    def changes(self, name: str) -> bool:
        """Whether the heads or the key heads of a site change."""
        return bool(self.removed.get(name) or self.copied.get(name) or self.merged.get(name))

    def heads(self, name: str) -> list[int]:
        """For each head that a site will have, the present head that it comes from."""
        users = [{head} for head in range(self.sites[name].heads)]
        return arranged(users, self.removed.get(name, ()), self.copied.get(name, ()))

    def key_heads(self, name: str) -> list[int]:
        """The same for the key heads."""
        groups = [set(group) for group in groups_of(self.sites[name])]
        stay = arranged(groups, self.removed.get(name, ()), self.copied.get(name, ()))
        merged_heads = self.merged.get(name, ())
        return [key_head for key_head in stay if key_head not in merged_heads]

    def touched(self, name: str) -> list[int]:
        """The heads of a site that go, or that are copied."""
        copied = {head for heads in self.copied.get(name, ()) for head in heads}
        return sorted({*self.removed.get(name, ()), *copied})

    def emptied(self) -> list[str]:
        """The sites that lose all heads."""
        return [name for name in self.sites if not self.heads(name)]

    def of_users(self, names: Iterable[str]) -> tuple[set[tuple[str, int]], list[set[tuple[str, int]]]]:
        """The heads of these sites that go, and those that are copied together, as (site, head).

        Calls of one module share its weights: what is copied in all of them is copied once.
        """
        removed = {(name, head) for name in names for head in self.removed.get(name, ())}
        copies: dict[tuple[int, frozenset[int]], set[tuple[str, int]]] = {}
        for name in names:
            for number, heads in enumerate(self.copied.get(name, ())):
                copies.setdefault((number, heads), set()).update((name, head) for head in heads)
        return removed, list(copies.values())

    def describe(self, name: str) -> str:
        """What happens at a site, for messages."""
        if self.removed.get(name):
            return f"without heads {self.removed[name]}"
        if self.merged.get(name):
            return f"with {len(self.key_heads(name))} key heads"
        more = len(self.heads(name)) - self.sites[name].heads
        return f"with {more} more head{'s' * (more > 1)}"

    @property
    def result(self) -> str:
        """What the changed model is called in messages."""
        return f"the {_RESULTS[self.verb]} model"

    @property
    def expected(self) -> str:
        """What the changed model is compared with, for messages."""
        return _EXPECTED[self.verb]


def arranged(
    users: Sequence[Collection[User]],
    removed: Collection[User],
    copied: Iterable[Collection[User]],
    kinds: Sequence[object] | None = None,
) -> list[int]:
    """The indices of entries after a change, given the users of each entry.

    An entry goes when all its users do. It comes twice when all its users are copied: the copies of a run of
    such entries follow that run, so that any layout of heads stays what it was.

    kinds: runs end where these change.

    Examples
    --------
    Two heads of three rows each; their rows side by side; and two groups with a key head each.

    >>> arranged([{0}, {0}, {0}, {1}, {1}, {1}], {0}, [])
    [3, 4, 5]
    >>> arranged([{0}, {0}, {0}, {1}, {1}, {1}], (), [{1}])
    [0, 1, 2, 3, 4, 5, 3, 4, 5]
    >>> arranged([{0}, {1}, {0}, {1}, {0}, {1}], (), [{1}])
    [0, 1, 1, 2, 3, 3, 4, 5, 5]
    >>> arranged([{0}, {1}, {2}, {3}, {0, 1}, {2, 3}], (), [{2, 3}])
    [0, 1, 2, 3, 2, 3, 4, 5, 5]
    """
    sets = [frozenset(owners) for owners in users]
    copies_after: dict[int, list[int]] = {}
    for heads in map(set, copied):
        copied_sets = {owners: bool(owners) and owners <= heads for owners in set(sets)}
        run: list[int] = []
        for index, owners in enumerate(sets):
            is_copied = copied_sets[owners]
            if run and (not is_copied or (kinds is not None and kinds[index] != kinds[index - 1])):
                copies_after.setdefault(run[-1], []).extend(run)
                run = []
            if is_copied:
                run.append(index)
        if run:
            copies_after.setdefault(run[-1], []).extend(run)
    removed_sets = {owners for owners in set(sets) if owners and owners <= set(removed)}
    stay = [index for index, owners in enumerate(sets) if owners not in removed_sets]
    return [new for index in stay for new in (index, *copies_after.get(index, ()))]


def groups_of(site: Site) -> list[list[int]]:
    """The heads that share each key head.

    >>> groups_of(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)))
    [[0, 1], [2, 3]]
    """
    groups: dict[int, list[int]] = {}
    for head, key_head in enumerate(site.kv_heads):
        groups.setdefault(key_head, []).append(head)
    return [groups[key_head] for key_head in sorted(groups)]


def check_groups(site: Site, removed: list[int]) -> None:
    """Refuse heads whose removal would leave key heads with different numbers of query heads.

    >>> check_groups(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), [0, 1])
    >>> check_groups(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), [0])
    Traceback (most recent call last):
    ValueError: heads: 'attn' shares each key head among several heads; without head 0 its key heads 0, 1 \
would have 1, 2 of them. Remove whole groups, or the same number from every group; groups are 0-1, 2-3
    """
    sizes = Counter(site.kv_heads[head] for head in range(site.heads) if head not in removed)
    if len(set(sizes.values())) < 2:
        return
    without = f"head{'s' * (len(removed) > 1)} {', '.join(map(str, sorted(removed)))}"
    raise ValueError(
        f"heads: {site.name!r} shares each key head among several heads; without {without} its key heads "
        f"{', '.join(map(str, sorted(sizes)))} would have {', '.join(str(sizes[k]) for k in sorted(sizes))} "
        f"of them. Remove whole groups, or the same number from every group; groups are {named_groups(site)}"
    )


def named_groups(site: Site) -> str:
    """The groups of a site, for messages."""
    return ", ".join(_span(group) for group in groups_of(site))


def _span(heads: list[int]) -> str:
    if heads == list(range(heads[0], heads[-1] + 1)) and len(heads) > 1:
        return f"{heads[0]}-{heads[-1]}"
    return "+".join(map(str, heads))
