"""Which rows and columns belong to the heads of an arrangement: leaving them out, or taking them twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from manyheads.capture.weights import ROLES, Head, Part, Projections
from manyheads.models.changes import Changes, get_tensor, set_tensor
from manyheads.surgery.arrangement import Arrangement, arranged


@dataclass
class Slice:
    """What becomes of one parameter or buffer: the entries ``indices`` along ``axis``, out of ``size``; some
    may come twice.

    shares: what each entry is multiplied by, for those that read heads: the copies of a head share what it
        says.

    >>> Slice(axis=0, indices=[0, 1, 1], size=2, shares=[1.0, 0.75, 0.25]).of(torch.tensor([8.0, 4.0]))
    tensor([8., 3., 1.])
    """

    axis: int
    indices: list[int]
    size: int
    shares: list[float] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The entries of a tensor."""
        index = torch.tensor(self.indices, dtype=torch.long, device=tensor.device)
        chosen = tensor.index_select(self.axis, index)
        if self.shares is None:
            return chosen
        shares = torch.tensor(self.shares, dtype=torch.float64).to(tensor.dtype).to(tensor.device)
        return chosen * shares.view(-1, *[1] * (tensor.dim() - self.axis - 1))

    @cached_property
    def copies(self) -> list[int]:
        """The positions of entries that have come before."""
        first = {index: position for position, index in reversed(list(enumerate(self.indices)))}
        return [position for position, index in enumerate(self.indices) if first[index] < position]

    def positions(self, indices: Iterable[int]) -> list[list[int]]:
        """Where each of these entries is now; several positions for one that comes twice."""
        by_index: dict[int, list[int]] = {index: [] for index in indices}
        for position, index in enumerate(self.indices):
            if index in by_index:
                by_index[index].append(position)
        return list(by_index.values())

    @cached_property
    def touched(self) -> set[int]:
        """The indices that are left out, or come twice."""
        return set(range(self.size)) - set(self.indices) | {self.indices[copy] for copy in self.copies}


def slices(
    model: nn.Module,
    by_site: Mapping[str, Projections],
    arrangement: Arrangement,
    only: Mapping[str, set[str]],
) -> dict[str, Slice]:
    """What becomes of every parameter that changes: an entry goes, or comes twice, when all heads that use it
    do.

    only: for parameters that only some of their sites will go on using, those sites.

    Raises
    ------
    ValueError when a head shares its projections with heads that stay at other sites, or has none.
    """
    if arrangement.merged:
        return _merged_slices(model, by_site, arrangement)
    users: dict[str, tuple[int, list[set[tuple[str, int]]]]] = {}
    kinds: dict[str, list[str]] = {}
    for name, projections in by_site.items():
        for parameter, (axis, heads) in _users(model, projections, arrangement, kinds).items():
            if name not in only.get(parameter, {name}):
                continue
            of_parameter = users.setdefault(parameter, (axis, [set() for _ in heads]))
            for users_of_index, heads_of_index in zip(of_parameter[1], heads, strict=True):
                users_of_index.update((name, head) for head in heads_of_index)
    sliced = {}
    for parameter, (axis, indices) in users.items():
        removed, copied = arrangement.of_users({name: None for each in indices for name, _ in each})
        kept = arranged(indices, removed, copied, kinds.get(parameter))
        if kept != list(range(len(indices))):
            sliced[parameter] = Slice(axis, kept, len(indices))
    for name, projections in by_site.items():
        for head in arrangement.touched(name):
            _check_separable(projections, head, sliced, users, arrangement)
        _share(projections, arrangement, sliced)
    return sliced


def _users(
    model: nn.Module, projections: Projections, arrangement: Arrangement, kinds: dict[str, list[str]]
) -> dict[str, tuple[int, list[frozenset[int]]]]:
    """The users of each parameter, by index. Where all heads of a site are copied together, also of those
    that all heads share; ``kinds`` then says what each index is for.
    """
    every = frozenset(range(projections.site.heads))
    if every not in arrangement.copied.get(projections.site.name, ()):
        return projections.users
    users = dict(projections.users)
    for role in ROLES:
        for head in projections.heads:
            for part in (*getattr(head, role), *head.biases.get(role, ())):
                reads = role != "output" or part.parameter in projections.readers
                if part.parameter in projections.users or not reads:
                    continue
                size = get_tensor(model, part.parameter).shape[part.axis]
                _, of_index = users.setdefault(part.parameter, (part.axis, [frozenset()] * size))
                labels = kinds.setdefault(part.parameter, [""] * size)
                for index in part.indices:
                    of_index[index], labels[index] = every, role
    return users


def _merged_slices(
    model: nn.Module, by_site: Mapping[str, Projections], arrangement: Arrangement
) -> dict[str, Slice]:
    """What becomes of the parameters that make keys and values, where some key heads go and no head does."""
    gone: dict[str, tuple[int, set[int]]] = {}
    staying: dict[str, set[int]] = {}
    for name, projections in by_site.items():
        dropped = arrangement.merged.get(name, ())
        for number, head in enumerate(projections.heads):
            keys = [part for role in ("key", "value") for part in key_parts(head, role)]
            others = [*head.query, *head.output, *head.biases.get("query", ())]
            for part in keys if projections.site.kv_heads[number] in dropped else ():
                gone.setdefault(part.parameter, (part.axis, set()))[1].update(part.indices)
            for part in others if projections.site.kv_heads[number] in dropped else (*keys, *others):
                staying.setdefault(part.parameter, set()).update(part.indices)
    sliced = {}
    for parameter, (axis, indices) in gone.items():
        size = get_tensor(model, parameter).shape[axis]
        if indices & staying.get(parameter, set()):
            raise ValueError(
                f"kv_heads: cannot merge: {parameter} makes the keys or values of a key head that goes and "
                "something that stays, as when queries and keys are one; keep the key heads of that model"
            )
        sliced[parameter] = Slice(axis, [index for index in range(size) if index not in indices], size)
    return sliced


def key_parts(head: Head, role: str) -> list[Part]:
    """All parts that make the keys, or the values, of a head: products, biases, and what else takes part."""
    return [*getattr(head, role), *head.biases.get(role, ()), *head.beside.get(role, ())]


def _share(projections: Projections, arrangement: Arrangement, sliced: Mapping[str, Slice]) -> None:
    """Divide what reads a head among the copies of it: of m copies the i-th counts (m - i) parts."""
    for head in arrangement.touched(projections.site.name):
        for part in readers(projections, head):
            taken = sliced.get(part.parameter)
            if taken is None or not taken.copies or part.parameter not in projections.readers:
                continue
            taken.shares = taken.shares or [1.0] * len(taken.indices)
            for positions in taken.positions(part.indices):
                count = len(positions)
                for number, position in enumerate(positions):
                    taken.shares[position] = 2 * (count - number) / (count * (count + 1))


def readers(projections: Projections, head: int) -> list[Part]:
    """The parts that read a head's output, and those of a gate that it is multiplied by before. Such a gate
    may read its keys again, as a sink does: those stay with their group.
    """
    weights = projections.heads[head]
    return [part for part in weights.output if part not in weights.key]


def _check_separable(
    projections: Projections,
    head: int,
    sliced: Mapping[str, Slice],
    users: Mapping[str, tuple[int, list[set[tuple[str, int]]]]],
    arrangement: Arrangement,
) -> None:
    """Refuse a head whose queries or readers would stay as they are."""
    site, verb = projections.site, arrangement.verb
    query = projections.heads[head].query
    # without what turns the queries of all heads alike, as learned angles do
    distinct = [part for part in query if not all(part in other.query for other in projections.heads)]
    reading = readers(projections, head)
    parts: list[Part] = [*(distinct or query), *reading]
    if not parts or not reading:
        raise ValueError(
            f"heads: cannot {verb} at {site.name!r}: no weights read its output head by head, as when one "
            "norm goes over the outputs of all heads"
        )
    if projections.tied:
        raise ValueError(
            f"heads: cannot {verb} head {head} at {site.name!r}: every head depends on all of "
            f"{projections.tied[0]}, as when one norm goes over the queries of all heads"
        )
    changing = {(name, head) for name in arrangement.sites for head in arrangement.touched(name)}
    for part in parts:
        taken = sliced.get(part.parameter)
        if taken is not None and set(part.indices) <= taken.touched:
            continue
        others = {
            user
            for index in part.indices
            if part.parameter in users
            for user in users[part.parameter][1][index] - changing
        }
        elsewhere = sorted({other for other, _ in others if other != site.name})
        if elsewhere:
            raise ValueError(
                f"heads: head {head} at {site.name!r} shares {part.parameter} with {', '.join(elsewhere)}; "
                "name the same heads there, too"
            )
        raise ValueError(
            f"heads: cannot {verb} head {head} at {site.name!r}: other heads depend on its part of "
            f"{part.parameter}, as when one norm goes over the queries or outputs of all heads"
        )


def apply_slices(model: nn.Module, sliced: Mapping[str, Slice], changes: Changes) -> None:
    """Take the slices, and record the new shapes."""
    for name, taken in sliced.items():
        with torch.no_grad():
            chosen = taken.of(get_tensor(model, name).detach()).clone()
        set_tensor(model, name, chosen)
        changes.shapes[name] = list(chosen.shape)


def possible_sizes(
    projections: Projections, arrangement: Arrangement, sliced: Mapping[str, Slice]
) -> dict[int, list[int]]:
    """Sizes that a module may keep, and what each may have become: the numbers of heads, key heads and heads
    in a group, the width of all queries, the width of a packed projection.
    """
    site = projections.site
    heads, key_heads = arrangement.heads(site.name), arrangement.key_heads(site.name)
    pairs = [(site.heads, len(heads)), (len(set(site.kv_heads)), len(key_heads))]
    if key_heads:
        pairs.append((site.heads // len(set(site.kv_heads)), len(heads) // len(key_heads)))
    for role in ROLES:
        entries = {
            (part.parameter, index)
            for head in projections.heads
            for part in getattr(head, role)
            for index in part.indices
        }
        pairs.append((len(entries), _count(entries, sliced)))
    pairs += [(taken.size, len(taken.indices)) for taken in sliced.values()]
    becomes: dict[int, list[int]] = {}
    for old, new in pairs:
        if old != new and new not in becomes.setdefault(old, []):
            becomes[old].append(new)
    return becomes


def _count(entries: Iterable[tuple[str, int]], sliced: Mapping[str, Slice]) -> int:
    """How many entries there are after the change."""
    times = {parameter: Counter(taken.indices) for parameter, taken in sliced.items()}
    return sum(times[parameter][index] if parameter in times else 1 for parameter, index in entries)
