"""Which rows and columns belong to the removed heads, and removing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from manyheads.capture.site import Site
from manyheads.capture.weights import ROLES, Part, Projections
from manyheads.models.changes import Changes, get_tensor, set_tensor

Removed = Mapping[str, list[int]]  # site name -> heads that go


@dataclass
class Shrink:
    """What stays of one parameter or buffer: the indices ``keep`` along ``axis``, out of ``size``."""

    axis: int
    keep: list[int]
    size: int


def check_groups(site: Site, removed: list[int]) -> None:
    """Refuse heads whose removal would leave key heads with different numbers of query heads.

    >>> check_groups(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), [0, 1])
    >>> check_groups(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), [0])
    Traceback (most recent call last):
    ValueError: heads: 'attn' shares each key head among several heads; without head 0 its key heads 0, 1 \
would have 1, 2 of them. Remove whole groups, or the same number from every group; groups are 0-1, 2-3
    """
    left = Counter(site.kv_heads[head] for head in range(site.heads) if head not in removed)
    if len(set(left.values())) < 2:
        return
    groups: dict[int, list[int]] = {}
    for head, kv_head in enumerate(site.kv_heads):
        groups.setdefault(kv_head, []).append(head)
    named = ", ".join(_span(group) for group in groups.values())
    without = f"head{'s' * (len(removed) > 1)} {', '.join(map(str, sorted(removed)))}"
    raise ValueError(
        f"heads: {site.name!r} shares each key head among several heads; without {without} its key heads "
        f"{', '.join(map(str, sorted(left)))} would have {', '.join(str(left[k]) for k in sorted(left))} of "
        f"them. Remove whole groups, or the same number from every group; groups are {named}"
    )


def _span(heads: list[int]) -> str:
    if heads == list(range(heads[0], heads[-1] + 1)) and len(heads) > 1:
        return f"{heads[0]}-{heads[-1]}"
    return "+".join(map(str, heads))


def shrinks(
    by_site: Mapping[str, Projections], removed: Removed, only: Mapping[str, set[str]]
) -> dict[str, Shrink]:
    """What stays of every parameter: an entry is removed when all heads that use it are.

    only: for parameters that only some of their sites will go on using, those sites.

    Raises
    ------
    ValueError when a head shares its projections with heads that stay at other sites, or has none.
    """
    users: dict[str, tuple[int, list[set[tuple[str, int]]]]] = {}
    for name, projections in by_site.items():
        for parameter, (axis, heads) in projections.users.items():
            if name not in only.get(parameter, {name}):
                continue
            of_parameter = users.setdefault(parameter, (axis, [set() for _ in heads]))
            for users_of_index, heads_of_index in zip(of_parameter[1], heads, strict=True):
                users_of_index.update((name, head) for head in heads_of_index)
    removed_heads = {(name, head) for name, heads in removed.items() for head in heads}
    shrunk = {}
    for parameter, (axis, indices) in users.items():
        keep = [
            index
            for index, heads_of_index in enumerate(indices)
            if not heads_of_index or not heads_of_index <= removed_heads
        ]
        if len(keep) < len(indices):
            shrunk[parameter] = Shrink(axis, keep, len(indices))
    for name, numbers in removed.items():
        for head in numbers:
            _check_removable(by_site[name], head, shrunk, users, removed_heads)
    return shrunk


def _check_removable(
    projections: Projections,
    head: int,
    shrunk: Mapping[str, Shrink],
    users: Mapping[str, tuple[int, list[set[tuple[str, int]]]]],
    removed_heads: set[tuple[str, int]],
) -> None:
    """Refuse a head whose queries or readers would stay."""
    site = projections.site
    query = projections.heads[
        head
    ].query  # without what turns the queries of all heads alike, as learned angles do
    distinct = [part for part in query if not all(part in other.query for other in projections.heads)]
    # what its output is multiplied by may read its keys again, as a sink does: these stay with their group
    readers = [part for part in projections.heads[head].output if part not in projections.heads[head].key]
    parts: list[Part] = [*(distinct or query), *readers]
    if not parts or not readers:
        raise ValueError(
            f"heads: cannot cut at {site.name!r}: no weights read its output head by head, as when one "
            "norm goes over the outputs of all heads"
        )
    if projections.tied:
        raise ValueError(
            f"heads: cannot cut head {head} at {site.name!r}: every head depends on all of "
            f"{projections.tied[0]}, as when one norm goes over the queries of all heads"
        )
    for part in parts:
        shrink = shrunk.get(part.parameter)
        if shrink is not None and not set(part.indices) & set(shrink.keep):
            continue
        others = {
            user
            for index in part.indices
            if part.parameter in users
            for user in users[part.parameter][1][index] - removed_heads
        }
        elsewhere = sorted({other for other, _ in others if other != site.name})
        if elsewhere:
            raise ValueError(
                f"heads: head {head} at {site.name!r} shares {part.parameter} with {', '.join(elsewhere)}; "
                "name the same heads there, too"
            )
        raise ValueError(
            f"heads: cannot cut head {head} at {site.name!r}: other heads depend on its part of "
            f"{part.parameter}, as when one norm goes over the queries or outputs of all heads"
        )


def apply(model: nn.Module, shrunk: Mapping[str, Shrink], changes: Changes) -> None:
    """Remove the rows and columns, and record the new shapes."""
    for name, shrink in shrunk.items():
        tensor = get_tensor(model, name)
        keep = torch.tensor(shrink.keep, dtype=torch.long, device=tensor.device)
        with torch.no_grad():
            smaller = tensor.detach().index_select(shrink.axis, keep).clone()
        set_tensor(model, name, smaller)
        changes.shapes[name] = list(smaller.shape)


def sizes(projections: Projections, removed: list[int], shrunk: Mapping[str, Shrink]) -> dict[int, list[int]]:
    """Sizes that a module may keep, and what each may have become: the numbers of heads, key heads and heads
    in a group, the width of all queries, the width of a packed projection.
    """
    site = projections.site
    left = [head for head in range(site.heads) if head not in removed]
    kv_before, kv_after = len(set(site.kv_heads)), len({site.kv_heads[head] for head in left})
    pairs = [(site.heads, len(left)), (kv_before, kv_after)]
    if kv_after:
        pairs.append((site.heads // kv_before, len(left) // kv_after))
    for role in ROLES:
        for before, after in (
            (_indices(projections, role, range(site.heads)), _indices(projections, role, left)),
        ):
            pairs.append((len(before), len(after)))
    pairs += [(shrink.size, len(shrink.keep)) for shrink in shrunk.values()]
    becomes: dict[int, list[int]] = {}
    for old, new in pairs:
        if old != new and new not in becomes.setdefault(old, []):
            becomes[old].append(new)
    return becomes


def _indices(projections: Projections, role: str, heads: range | list[int]) -> set[tuple[str, int]]:
    return {
        (part.parameter, index)
        for head in heads
        for part in getattr(projections.heads[head], role)
        for index in part.indices
    }
