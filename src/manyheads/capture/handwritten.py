"""Attention written by hand: from a product of activations over a softmax to the product with the values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.capture.axes import Roles
from manyheads.capture.tensor_tags import NOT_MERGED, Flow, Product, Tag, Weights, memory_of, version_of
from manyheads.common.types import Arguments, Function, Keywords

if TYPE_CHECKING:
    from manyheads.capture.frame import Frame

_aten = torch.ops.aten
MATMULS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    _aten.matmul.default,
    _aten.bmm.default,
}
ADDED_MATMULS = {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_, _aten.baddbmm.default}
SOFTMAXES = {
    F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax,
    _aten.softmax.int, _aten._softmax.default,
}  # fmt: skip


class Contraction(NamedTuple):
    """Weights times values, found: who they are and what the axes of values and result mean."""

    weights: Weights
    factor: Tensor  # the weights as they are now
    tag: Tag  # of the factor
    value: Tensor
    value_roles: Roles
    output_roles: Roles


def operands(func: Function, args: Arguments, kwargs: Keywords) -> tuple[Tensor, Tensor] | None:
    """The two factors of a matrix product."""
    if func in ADDED_MATMULS:
        named = [kwargs.get("batch1", args[1] if len(args) > 1 else None), kwargs.get("batch2")]
        named[1] = args[2] if len(args) > 2 else named[1]
    else:
        named = list(args[:2]) + [kwargs[name] for name in ("input", "other", "mat2") if name in kwargs]
    left, right = (*named, None, None)[:2]
    return (left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else None


class Proved(NamedTuple):
    """What was proved of the products of a module: the roles of their axes, and the heads in a merged one."""

    roles: Roles
    heads: int


def product(
    flow: Flow,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    heads: Collection[int],
    path: str,
    proved: Proved | None,
) -> Contraction | None:
    """Look at ``out = left @ right``: the end of attention, or perhaps its beginning, which is tagged.

    ``heads`` are numbers of heads that the running module names: of several leading axes, one of that size
    is the heads. ``path`` is that module; ``proved`` overrules custom.
    """
    if left.dim() < 3 or right.dim() < 3:
        return None
    for factor, value, ends in ((left, right, "qkkdqd"), (right, left, "kqdkdq")):
        tag = flow.get(factor)
        if tag is None or tag.weights is None or tag.roles is None or tag.roles[-2:] != tuple(ends[:2]):
            continue
        lead = (("b",) * value.dim() + tag.roles[:-2])[2 - value.dim() :]
        return Contraction(tag.weights, factor, tag, value, (*lead, *ends[2:4]), (*tag.roles[:-2], *ends[4:]))
    if flow.is_constant(left) or flow.is_constant(right):
        return None
    axes = proved.roles[:-2] if proved is not None else _lead(left, right, out, heads)
    if axes is not None:
        query, key = (*axes[2 - left.dim() :], "q", "d"), (*axes[2 - right.dim() :], "d", "k")
        size = out.dim()
        begun = Product(
            left, right, query, key, 0, 0, NOT_MERGED, origin=(path, "product", size),
            axes=(*range(size - left.dim(), size - 1), -1),
            key_axes=(*range(size - right.dim(), size - 2), -1, size - 1),
            result=(*axes, "q", "k"), heads=proved.heads if proved else 0,
        )  # fmt: skip
        _begin(flow, begun, out)
    return None


def _lead(left: Tensor, right: Tensor, out: Tensor, heads: Collection[int]) -> Roles | None:
    """What the axes before the last two of a product are, by convention."""
    if out.dim() == 3:
        return ("n",)
    if out.dim() == 4:
        return ("b", "h")
    if out.dim() != 5:
        return None
    first, second = out.shape[1:3]
    if right.dim() == 5 and (right.shape[2] == 1 or right.stride(2) == 0):
        if first * second in heads or second not in heads:
            return ("b", "h", "g")
    elif (first in heads) != (second in heads):
        return ("b", "h", "b") if first in heads else ("b", "b", "h")
    elif any(_next_to_width(x, 1) for x in (left, right)):
        return ("b", "h", "b")  # blocks of a sequence, or windows
    return ("b", "b", "h")


def _next_to_width(x: Tensor, axis: int) -> bool:
    """Whether an axis lies next to the width in memory, as heads do where a projection left them."""
    if x.dim() != 5:
        return False
    width = min((-1, -2), key=x.stride)
    return x.shape[axis] > 1 and x.stride(axis) == x.shape[width] * x.stride(width) != x.stride(3 - axis)


def _begin(flow: Flow, begun: Product, out: Tensor) -> None:
    left, right = flow.get(begun.query), flow.get(begun.key)
    begun.merged = next(
        (tag.merged for tag in (left, right) if tag is not None and tag.merged[0]), NOT_MERGED
    )
    begun.streams, begun.key_streams = flow.streams(begun.query), flow.streams(begun.key)
    flow.put(out, Tag(begun.streams | begun.key_streams, begun.merged, begun.result, begun))


def softmax(
    flow: Flow,
    args: Arguments,
    kwargs: Keywords,
    out: Tensor,
    frames: tuple[Frame, ...],
    proved: Proved | None = None,
) -> None:
    """Tag the result of a softmax that may be attention."""
    scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(scores, Tensor) or not isinstance(dim, int):
        return
    tag = flow.get(scores)
    roles = tag.roles if tag is not None else None
    scores_product = tag.product if tag is not None else None
    if roles is None and scores.dim() == 4 and dim % 4 == 3:  # scores made by means that were not seen
        roles = proved.roles if proved is not None else ("b", "h", "q", "k")
    if roles is None or roles[dim] not in ("q", "k"):
        flow.follow(F.softmax, args, kwargs, out)
        return
    if roles[dim] == "q":  # rows and columns were the other way round
        roles = _exchanged(roles)
        if scores_product is not None:
            scores_product = _transposed(scores_product)
    streams = tag.streams if tag is not None else flow.streams(scores)
    merged = tag.merged if tag is not None else NOT_MERGED
    weights = Weights(scores, roles, scores_product, frames, version_of(scores))
    overwritten = memory_of(out) == memory_of(scores)  # softmax(out=scores): what went into it is gone
    flow.put(out, Tag(streams, merged, roles, None, weights, modified=overwritten))


def _transposed(scores: Product) -> Product:
    """The product with queries and keys exchanged."""
    return replace(
        scores, query=scores.key, key=scores.query, query_roles=_exchanged(scores.key_roles),
        key_roles=_exchanged(scores.query_roles), streams=scores.key_streams, key_streams=scores.streams,
        axes=scores.key_axes, key_axes=scores.axes,
    )  # fmt: skip


def _exchanged(roles: Roles) -> Roles:
    return tuple({"q": "k", "k": "q"}.get(role, role) for role in roles)


def einsum(
    flow: Flow,
    args: Arguments,
    out: Tensor,
    heads: Collection[int],
    path: str,
    proved: Proved | None,
) -> Contraction | None:
    """Look at an einsum of two tensors as `product` looks at a matrix product."""
    factors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(args[0], str) or len(factors) != 2:
        return None
    letters = _letters(args[0], [factor.dim() for factor in factors], out.dim())
    if letters is None:
        return None
    for weighting, other in ((0, 1), (1, 0)):
        tag = flow.get(factors[weighting])
        if tag is not None and tag.weights is not None and tag.roles is not None:
            role = dict(zip(letters[weighting], tag.roles, strict=True))
            key = next((letter for letter, name in role.items() if name == "k"), None)
            if key is None or key in letters[2] or key not in letters[other]:
                return None
            values = tuple(role.get(letter, "d") for letter in letters[other])
            result = tuple(role.get(letter, "d") for letter in letters[2])
            if result.count("d") != 1 or "q" not in result or factors[other].dim() < 3:
                return None
            return Contraction(tag.weights, factors[weighting], tag, factors[other], values, result)
    if any(factor.dim() < 3 or flow.is_constant(factor) for factor in factors):
        return None
    sizes = {
        c: size
        for word, x in zip(letters, factors, strict=False)
        for c, size in zip(word, x.shape, strict=True)
    }
    roles = _roles_of_scores(letters, sizes, heads)
    if roles is not None:
        if proved is not None:
            roles |= dict(zip(letters[2], proved.roles, strict=True))
        named = [tuple(roles[letter] for letter in word) for word in letters]
        where = [tuple(letters[2].find(letter) for letter in word) for word in letters[:2]]
        begun = Product(
            factors[0], factors[1], named[0], named[1], 0, 0, NOT_MERGED, origin=(path, "product", out.dim()),
            axes=where[0], key_axes=where[1], result=named[2], heads=proved.heads if proved else 0,
        )  # fmt: skip
        _begin(flow, begun, out)
    return None


def _letters(equation: str, dims: list[int], out: int) -> list[str] | None:
    """The words of an einsum equation with ``...`` spelt out: [first, second, result]."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    words = [*left.split(","), right]
    if not arrow or len(words) != 3:
        return None
    spare = [letter for letter in "ZYXWVU" if letter not in equation]
    full = []
    for word, dim in zip(words, [*dims, out], strict=True):
        missing = dim - len(word.replace("...", ""))
        full.append(word.replace("...", "".join(reversed(spare[:missing]))))
    return full


def _roles_of_scores(
    letters: list[str], sizes: dict[str, int], heads: Collection[int]
) -> dict[str, str] | None:
    """Roles of the letters of ``scores = einsum(query, key)``: shared letters are batch, the last of them
    heads, unless only another has the size of a number of heads.
    """
    first, second, result = letters
    shared = [c for c in first if c in second and c in result]
    summed = [c for c in first if c in second and c not in result]
    rows = [c for c in first if c not in second and c in result]
    columns = [c for c in second if c not in first and c in result]
    if len(summed) != 1 or len(columns) != 1 or not shared or len(rows) not in (1, 2):
        return None
    role = dict.fromkeys(shared, "b") | {summed[0]: "d", columns[0]: "k"}
    head = next((c for c in reversed(shared[1:]) if sizes[c] in heads), shared[-1])
    if (
        len(rows) == 2
    ):  # one key head for several query heads: their letter follows that of the key heads or batch
        after = first[first.index(shared[-1]) + 1 :][:1]
        group = after if after in rows else rows[0]
        rows.remove(group)
        role[group] = "h" if len(shared) == 1 else "g"
        if role[group] == "g" and sizes[head] in heads and sizes[head] * sizes[group] not in heads:
            role[group] = "b"  # blocks of queries that all read the same keys
    if len(shared) > 1:
        role[head] = "h"
    elif "h" not in role.values():
        role[shared[0]] = "n"
    role[rows[0]] = "q"
    return role
