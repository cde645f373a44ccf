"""Which axes of a tensor are heads, as the weights show that made it.

Indices along an axis that depend on the same rows of weights are one head; other rows, another head. An axis
whose every index depends on all rows holds sequences, or blocks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.capture.axes import Roles
from manyheads.capture.dependence import Leaf
from manyheads.capture.destinations import MIXED, UNUSED, destinations

_ROWS = 64  # of weights that are looked at together
_OFTEN = 0.25  # of how often the index is reached that is reached most, in half precision


class _Slack(NamedTuple):
    """What rounding may hide. everywhere: the share of the indices that stands for all of them; no head has
    more than half. strays: the share of the rows that may reach fewer.
    """

    everywhere: float
    strays: float


_EXACT, _HALF = _Slack(0.9, 0.0), _Slack(0.7, 0.05)


class Axis(NamedTuple):
    """What an axis is: its role ``b`` (no heads), ``h`` (one head an index), ``n`` (batch * heads), ``m``
    (heads * batch), ``?`` (none of these), and how many heads it has. ``joint``: all rows of one product go
    to the same indices, and those of another to others, as where tokens of two kinds are joined.
    """

    role: str
    heads: int
    joint: bool = False


class Origins(NamedTuple):
    """Where a tensor comes from.

    axes: what each of the axes asked for is.
    rows: the rows of weights it depends on.
    data: the tokens that it depends on, of each product with weights before it.
    """

    axes: list[Axis]
    rows: frozenset[object]
    data: frozenset[object]


def origins(tensor: Tensor, axes: Sequence[int], leaves: Sequence[Leaf]) -> Origins | None:
    """What the axes of a tensor are, and what it depends on; None when no weights are behind it."""
    if not leaves or not tensor.requires_grad or not tensor.numel():
        return None
    going = destinations(tensor, axes, leaves)
    sets: list[list[Tensor]] = [[] for _ in axes]  # for each axis, for each row the indices it goes to
    rows: set[object] = set()
    data: set[object] = set()
    exact = torch.finfo(tensor.dtype).eps < 1e-5
    for leaf, targets in zip(leaves, going, strict=True):
        by_row = leaf.by_row(targets)  # (axes, rows, data)
        used = by_row[0] != UNUSED if len(axes) else leaf.by_row(targets[None]) != UNUSED
        alive = used.any(1)
        if not bool(alive.any()):
            continue
        rows |= {(leaf.weights, row) for row in alive.nonzero().flatten().tolist()}
        data |= {(leaf.number, token) for token in used.any(0).nonzero().flatten().tolist()}
        for number, axis in enumerate(axes):
            reached = _indices if exact else _often_reached
            sets[number].append(reached(by_row[number][alive], tensor.shape[axis]))
    if not rows:
        return None
    slack = _EXACT if exact else _HALF
    proved = [
        _axis(torch.cat(parts), slack)._replace(joint=_is_joint(parts)) if parts else Axis("?", 0)
        for parts in sets
    ]
    return Origins(proved, frozenset(rows), frozenset(data))


def _indices(targets: Tensor, size: int) -> Tensor:
    """Which of ``size`` indices the elements of each row (rows, data) go to: (rows, size)."""
    if not targets.numel():
        return torch.zeros(targets.shape[0], size, dtype=torch.bool)
    out = torch.zeros(targets.shape[0], size + 1, dtype=torch.bool)  # the last is for those that go nowhere
    for rows, piece in zip(out.split(_ROWS), targets.split(_ROWS), strict=True):
        rows.scatter_(1, torch.where(piece >= 0, piece, size).long(), True)
        rows |= (piece == MIXED).any(1, keepdim=True)
    return out[:, :size]


def _often_reached(targets: Tensor, size: int) -> Tensor:
    """As `_indices`, without those to which rounding in half precision sends a few of a row's elements."""
    counts = torch.zeros(targets.shape[0], size + 2)
    index = torch.where(targets >= 0, targets, torch.where(targets == MIXED, size, size + 1))
    counts.scatter_add_(1, index.long(), torch.ones(index.shape))
    index_counts = counts[:, :size]
    often = index_counts >= (_OFTEN * index_counts.amax(1, keepdim=True)).clamp(min=1)
    mixed = counts[:, size] > index_counts.sum(1)  # most of them go to several
    return often | mixed.unsqueeze(1)


def _axis(sets: Tensor, slack: _Slack = _EXACT) -> Axis:
    """What an axis is, from the indices that each row of weights goes to: (rows, size).

    >>> _axis(torch.eye(3, dtype=torch.bool))[:2], _axis(torch.ones(4, 3, dtype=torch.bool))[:2]
    (('h', 3), ('b', 1))
    >>> _axis(torch.tensor([[True, False, True, False], [False, True, False, True]]))[:2]
    ('n', 2)
    >>> _axis(torch.tensor([[True, True, False], [True, True, False]]))[:2]
    ('b', 1)
    """
    size = sets.shape[1]
    reached = sets.any(0)  # the others are padding
    # Rows of keys that several heads read go everywhere; of many tokens, a rotation may hide one by chance.
    is_local = sets[:, reached].float().mean(1) <= slack.everywhere
    if float(is_local.float().mean()) <= slack.strays:
        return Axis("b", 1)
    kinds = sets[is_local].unique(dim=0)
    if bool((kinds.sum(0) != 1).any()) or len({int(count) for count in kinds.sum(1)}) != 1:
        return Axis("?", 0)
    heads = len(kinds)
    if heads == size:
        return Axis("h", size)
    head_of = kinds.long().argmax(0)  # (size,) which kind each index is of
    steps = torch.arange(size)
    if _same_partition(head_of, steps % heads):
        return Axis("n", heads)
    if _same_partition(head_of, steps // (size // heads)):
        return Axis("m", heads)
    return Axis("?", 0)


def _is_joint(parts: Sequence[Tensor]) -> bool:
    """Whether the rows (rows, size) of each of several products go all the same way, but for one in a hundred
    that rounding hides.
    """
    return len(parts) > 1 and all(bool(_same_as_most(part).float().mean() > 0.99) for part in parts)


def _same_as_most(rows: Tensor) -> Tensor:
    return (rows == (rows.float().mean(0) > 0.5)).all(1)


def _same_partition(first: Tensor, second: Tensor) -> bool:
    pairs = torch.stack([first, second], 1).unique(dim=0)
    return len(pairs) == len(first.unique()) == len(second.unique())


def agree(role: str, heads: int, axis: Axis, size: int) -> bool:
    """Whether a role that custom gave to an axis is the one that the weights show."""
    if size == 1:
        return True
    if role in ("h", "g"):
        return axis.role == "h"
    if role in ("n", "m"):
        return (
            (axis.role, axis.heads) == (role, heads)
            or (axis.role == "b" and heads == 1)
            or (axis.role == "h" and heads == size)
        )
    return axis.role == "b"


def roles_from(axes: Sequence[Axis]) -> Roles | None:
    """The roles of leading axes that are what the weights show; None when some axis is nothing of the
    kind."""
    roles: list[str] = []
    for axis in axes:
        if axis.role == "?":
            return None
        roles.append("g" if axis.role == "h" and "h" in roles else axis.role)
    return tuple(roles)


def keys_are_tokens(value: Tensor, leaves: Sequence[Leaf]) -> bool:
    """Whether the keys' values (batch, heads, keys, width) are those of tokens: a token goes to one key, and
    a row of weights to all. Where it is the other way round, as in attention between channels, they are no
    keys.
    """
    if value.shape[2] < 2 or not leaves or not value.requires_grad:
        return True
    middle = value.shape[0] // 2  # of one block alone: a neighbour's keys may be the same tokens
    value = value[middle : middle + 1]
    tokens, rows, count = 0.0, 0.0, 0
    for leaf, targets in zip(leaves, destinations(value, [2], leaves), strict=True):
        by_row = leaf.by_row(targets)[0]  # (rows, data)
        if bool((by_row != UNUSED).any()):
            reach = [
                _indices(x[(x != UNUSED).any(1)], value.shape[2]).float().mean() for x in (by_row, by_row.T)
            ]
            rows, tokens, count = rows + float(reach[0]), tokens + float(reach[1]), count + 1
    # where one token alone is new, as behind a cache, its rows reach as far as it does
    return not count or tokens < rows or tokens == rows < count
