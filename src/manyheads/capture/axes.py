"""What each axis of a tensor is, kept up through transposes and reshapes.

Roles: ``b`` batch, ``h`` heads, ``g`` query heads of one key head, ``n`` batch * heads, ``m`` heads * batch,
``q`` queries, ``k`` keys, ``d`` width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.common.types import Arguments, Function, Keywords

Roles = tuple[str, ...]
_ORDER = {role: position for position, role in enumerate("bnhgqkd")}

SWAPS = {
    torch.transpose, Tensor.transpose, Tensor.transpose_, torch.swapaxes, Tensor.swapaxes, torch.swapdims,
    Tensor.swapdims,
}  # fmt: skip
PERMUTES = {torch.permute, Tensor.permute}
LAST_SWAPS = {Tensor.mT.__get__, Tensor.mH.__get__, torch.adjoint, Tensor.adjoint}  # type: ignore[attr-defined]
MOVEDIMS = {torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis}
_LOSES = {Tensor.T.__get__, Tensor.H.__get__}  # type: ignore[attr-defined]


def roles_after(
    func: Function,
    args: Arguments,
    kwargs: Keywords,
    roles: Roles,
    before: Tensor,
    after: Tensor,
) -> Roles | None:
    """The roles of the result's axes, or None when it is no longer one weight per query and key."""
    if func in SWAPS:
        first, second = (*args[1:], *(value for name, value in sorted(kwargs.items()) if name != "input"))
        return _swap(roles, first, second)
    if func in LAST_SWAPS:
        return _swap(roles, -1, -2)
    if func in PERMUTES:
        dims = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:] or kwargs["dims"]
        return tuple(roles[dim] for dim in dims)
    if func in MOVEDIMS:
        options = dict(zip(("input", "source", "destination"), args, strict=False)) | kwargs
        return _move(roles, options["source"], options["destination"])
    if func in _LOSES:
        return None
    if before.shape == after.shape:
        return roles
    if before.dim() == after.dim() and before.numel() != after.numel():
        changed = {
            role for role, old, new in zip(roles, before.shape, after.shape, strict=True) if old != new
        }
        return roles if changed == {"k"} else None  # a sink's column joined or dropped
    return (
        regroup(roles, tuple(before.shape), tuple(after.shape)) if before.numel() == after.numel() else None
    )


def has_blocks(roles: Roles) -> bool:
    """Whether several axes hold what is neither heads nor tokens: sequences, and pieces of each.

    >>> has_blocks(("b", "b", "h", "q", "k")), has_blocks(("n", "b", "q", "k")), has_blocks(("n", "q", "k"))
    (True, True, False)
    """
    return sum(role in ("b", "n", "m") for role in roles) > 1


def _swap(roles: Roles, first: int, second: int) -> Roles:
    result = list(roles)
    result[first], result[second] = roles[second], roles[first]
    return tuple(result)


def _move(roles: Roles, source: int | Sequence[int], destination: int | Sequence[int]) -> Roles:
    """The roles after `torch.movedim`.

    >>> _move(("b", "h", "q", "k"), 3, 0)
    ('k', 'b', 'h', 'q')
    """
    sources, targets = ([x] if isinstance(x, int) else list(x) for x in (source, destination))
    sources = [axis % len(roles) for axis in sources]
    rest = [role for axis, role in enumerate(roles) if axis not in sources]
    for target, axis in sorted(
        (target % len(roles), axis) for target, axis in zip(targets, sources, strict=True)
    ):
        rest.insert(target, roles[axis])
    return tuple(rest)


def regroup(roles: Roles, before: tuple[int, ...], after: tuple[int, ...]) -> Roles | None:
    """The roles of the axes after a reshape, or None when it tore queries, keys or heads apart.

    >>> regroup(("b", "h", "q", "k"), (2, 3, 5, 7), (6, 5, 7))
    ('n', 'q', 'k')
    >>> regroup(("n", "q", "k"), (6, 5, 7), (2, 3, 5, 7))
    ('b', 'h', 'q', 'k')
    >>> regroup(("b", "h", "q", "k"), (2, 3, 5, 7), (2, 15, 7)) is None
    True
    """
    out: list[str] = []
    i = j = 0
    while i < len(before) or j < len(after):
        olds, news = before[i : i + 1], after[j : j + 1]
        old_size, new_size = _size(olds), _size(news)
        while old_size != new_size or not olds or not news:
            if (old_size < new_size or not olds) and i + len(olds) < len(before):
                olds = before[i : i + len(olds) + 1]
            elif j + len(news) < len(after):
                news = after[j : j + len(news) + 1]
            elif i + len(olds) < len(before):
                olds = before[i : i + len(olds) + 1]
            else:
                break
            old_size, new_size = _size(olds), _size(news)
        if old_size != new_size:
            return None
        new_roles = _group(roles[i : i + len(olds)], olds, news)
        if new_roles is None:
            return None
        out += new_roles
        i, j = i + len(olds), j + len(news)
    return tuple(out)


def _size(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _group(roles: Roles, olds: tuple[int, ...], news: tuple[int, ...]) -> list[str] | None:
    """Roles of ``news``, the axes that a group of axes ``olds`` with ``roles`` was reshaped to."""
    if olds == news:
        return list(roles)
    if not olds or not news:  # axes of size 1 that came or went
        return ["b"] * len(news)
    old_roles = tuple(role for role, size in zip(roles, olds, strict=True) if size != 1) or roles[-1:]
    new_axes = [axis for axis, size in enumerate(news) if size != 1] or [len(news) - 1]
    if len(old_roles) > 1 and len(new_axes) == 1:
        merged_role = {
            "bh": "n",
            "hb": "m",
            "bb": "b",
            "hg": "h",
            "bhg": "n",
            "ng": "n",
            "bbh": "n",
            "hbb": "m",
        }.get("".join(old_roles))
        group_roles = [merged_role] if merged_role else None
    elif len(old_roles) == 1 and len(new_axes) == 2 and old_roles[0] in "nmhb":
        group_roles = {"n": ["b", "h"], "m": ["h", "b"], "h": ["h", "g"], "b": ["b", "b"]}[old_roles[0]]
    elif len(old_roles) == 1 and len(new_axes) == 1:
        group_roles = [old_roles[0]]
        if old_roles[0] == "n" and new_axes[0] + 1 < len(news):  # (batch * 1 head) -> (batch, 1)
            group_roles = ["b"]
        elif old_roles[0] == "n" and len(news) > 1:  # (1 * heads) -> (1, heads)
            group_roles = ["h"]
        elif old_roles[0] == "h" and len(news) == 1 and "b" in roles:  # (1, heads) -> (1 * heads)
            group_roles = ["n"]
    else:
        group_roles = None
    if group_roles is None:
        return None
    new_roles = ["b"] * len(news)
    for axis, role in zip(new_axes, group_roles, strict=True):
        new_roles[axis] = role
    return new_roles


def canonical(tensor: Tensor, roles: Roles, heads: int) -> Tensor:
    """View a tensor as (batch, heads, ...): axes in the order b, h, g, q, then k or d; ``n`` and ``m`` split
    into batch and heads.

    >>> canonical(torch.zeros(5, 6, 7), ("q", "n", "k"), heads=3).shape
    torch.Size([2, 3, 5, 7])
    >>> canonical(torch.arange(6.0).view(6, 1, 1), ("m", "q", "k"), heads=3)[:, 1].flatten()
    tensor([2., 3.])
    """
    if "m" in roles:
        axis = roles.index("m")
        tensor, roles = tensor.unflatten(axis, (heads, -1)), _split(roles, axis)
    tensor = tensor.permute(_arranged(roles))
    sizes = dict.fromkeys("bnhg", 1)
    for role, size in zip(roles, (tensor.shape[i] for i in _inverse_order(roles)), strict=True):
        if role in sizes:
            sizes[role] *= size
    merged = sizes["n"] // heads if "n" in roles else 1
    count = sizes["h"] * sizes["g"] * (heads if "n" in roles else 1)
    return tensor.reshape(sizes["b"] * merged, count, *tensor.shape[-2:])


def restore(tensor: Tensor, roles: Roles, shape: torch.Size) -> Tensor:
    """Undo `canonical`: back to the axes ``roles`` with ``shape``."""
    if "m" in roles:
        axis, heads = roles.index("m"), tensor.shape[1]
        parts = torch.Size((*shape[:axis], heads, shape[axis] // heads, *shape[axis + 1 :]))
        return restore(tensor, _split(roles, axis), parts).reshape(shape)
    order = _arranged(roles)
    return tensor.reshape([shape[i] for i in order]).permute(_inverse_order(roles))


def _split(roles: Roles, axis: int) -> Roles:
    return (*roles[:axis], "h", "b", *roles[axis + 1 :])


def _arranged(roles: Roles) -> list[int]:
    """The permutation that puts the axes into the order b, n, h, g, q, k or d."""
    return sorted(range(len(roles)), key=lambda i: _ORDER[roles[i]])


def _inverse_order(roles: Roles) -> list[int]:
    """Where `_arranged` puts each axis: its inverse."""
    order = _arranged(roles)
    return [order.index(i) for i in range(len(order))]
