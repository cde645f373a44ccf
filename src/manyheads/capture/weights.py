"""projections: which weights make the queries, keys and values of each head, and which read its output.

Found by running the model (`weight_tracing`), never from a list of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.capture.weight_tracing import Trace, traces
from manyheads.common.types import Batch
from manyheads.nn.orthogonal_rows import plain

ROLES = ("query", "key", "value", "output")


class Part(NamedTuple):
    """Entries of a parameter or buffer: ``indices`` along ``axis``.

    >>> Part("h.0.attn.c_attn.weight", axis=1, indices=(0, 1)).parameter
    'h.0.attn.c_attn.weight'
    """

    parameter: str
    axis: int
    indices: tuple[int, ...]


@dataclass
class Head:
    """The weights of one head. Each of the first four is usually one Part; the key's and value's are shared
    with the other heads of a group.

    query, key, value: of the products that make them; ``axis`` is the one of their output.
    output: of the products that read the head's output; ``axis`` is the one of their input.
    biases: of the products above, by role.
    extras: everything else that belongs to some heads alone: norms, bias tables, slopes, sinks, scales.
    beside: the extras that take part in making queries, keys or values, or reading the output, by role.
    """

    query: tuple[Part, ...] = ()
    key: tuple[Part, ...] = ()
    value: tuple[Part, ...] = ()
    output: tuple[Part, ...] = ()
    biases: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    extras: tuple[Part, ...] = ()
    beside: dict[str, tuple[Part, ...]] = field(default_factory=dict)


@dataclass
class Projections:
    """The weights of the heads of one site.

    site: the site.
    heads: one `Head` for each head.
    users: for each parameter or buffer that has to do with some heads and not with others, the axis that
        tells them apart, and for each index along it the heads that depend on it.
    readers: the parameters of the products that read the output, without what it is multiplied by before.
    tied: the parameters that make the queries, where every head depends on all of them, as behind a norm over
        all heads.
    d_key, d_value: the width of a head.
    """

    site: Site
    heads: list[Head]
    users: dict[str, tuple[int, list[frozenset[int]]]]
    readers: tuple[str, ...]
    tied: tuple[str, ...]
    d_key: int | None
    d_value: int


def projections(model: nn.Module, batch: Batch) -> dict[str, Projections]:
    """Which weights belong to which head, at every site that the batch reaches.

    Parameters
    ----------
    model: any torch.nn.Module; run once, in eval mode, and left as it was.
    batch: a dict (given as keyword arguments), a tuple or list (as positional ones), or anything else (as
        the only one). A few short sequences do.

    Returns
    -------
    ``{site name: Projections}``.

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> found = projections(layer, (x, x, x))[""]
    >>> found.heads[1].key
    (Part(parameter='in_proj_weight', axis=0, indices=(9, 10, 11)),)
    >>> found.heads[1].output
    (Part(parameter='out_proj.weight', axis=1, indices=(3, 4, 5)),)
    >>> weights(layer, found.heads[1].key).shape
    torch.Size([3, 6])
    """
    return {name: _projections(trace) for name, trace in traces(plain(model), batch).items()}


def weights(model: nn.Module, parts: Sequence[Part]) -> Tensor:
    """The entries of parts, one row for each index: (width, what the head reads or writes).

    >>> weights(nn.Linear(3, 2), [Part("weight", axis=1, indices=(0, 2))]).shape
    torch.Size([2, 2])
    """
    return live_weights(model, parts).detach()


def live_weights(model: nn.Module, parts: Sequence[Part]) -> Tensor:
    """The same, through which a gradient flows to the model's parameters."""
    rows = []
    for part in parts:
        path, _, name = part.parameter.rpartition(".")
        tensor: Tensor = getattr(model.get_submodule(path), name)
        index = torch.tensor(part.indices, device=tensor.device)
        rows.append(tensor.index_select(part.axis, index).movedim(part.axis, 0).flatten(1))
    return torch.cat(rows)


def _projections(trace: Trace) -> Projections:
    """Turn what was touched into parts."""
    count = trace.site.heads
    heads = [Head() for _ in range(count)]
    for (role, name), axes in trace.touched.items():
        product = name in trace.factors or name in trace.added
        axis = _axis_of_heads([rows[:count] for rows in axes])
        if axis is None and product and role in ROLES:
            axis = _axis_of_heads([rows[[0, -1]] for rows in axes])
        if axis is None:
            continue
        for head, rows in zip(heads, axes[axis], strict=False):
            part = Part(name, axis, tuple(rows.nonzero().flatten().tolist()))
            if part.indices:
                _put(head, role, part, name in trace.factors, name in trace.added)
    for head in heads:  # what has a role of its own, in a call seen before or after, is no extra
        used_parameters = {part.parameter for role in ROLES for part in getattr(head, role)}
        used_parameters |= {part.parameter for parts in head.biases.values() for part in parts}
        head.extras = tuple(
            part for part in dict.fromkeys(head.extras) if part.parameter not in used_parameters
        )
    readers = {name for role, name in trace.touched if role == "output" and name in trace.reading}
    makers = {name for role, name in trace.touched if role in ("query", "key", "value")}
    alone = any(head.query for head in heads)
    queries = {name for role, name in trace.touched if role == "query" and name in trace.factors}
    return Projections(
        trace.site,
        heads,
        _users(trace),
        tuple(sorted(readers - makers)),
        () if alone else tuple(sorted(queries)),
        trace.d_key,
        trace.d_value,
    )


def _put(head: Head, role: str, part: Part, factor: bool, added: bool) -> None:
    if role in ROLES and factor:
        setattr(head, role, (*getattr(head, role), part))
    elif role in ROLES and added:
        head.biases[role] = (*head.biases.get(role, ()), part)
    else:
        head.extras = (*head.extras, part)
        if role in ROLES:
            head.beside[role] = (*head.beside.get(role, ()), part)


def _users(trace: Trace) -> dict[str, tuple[int, list[frozenset[int]]]]:
    count = trace.site.heads
    joined: dict[str, list[Tensor]] = {}
    for (_, name), axes in trace.touched.items():
        rows = [row[:count] for row in axes]
        before = joined.get(name)
        joined[name] = rows if before is None else [a | b for a, b in zip(before, rows, strict=True)]
    users = {}
    for name, axes in joined.items():
        axis = _axis_of_heads(axes)
        if axis is not None:
            columns = axes[axis].T.tolist()
            users[name] = axis, [frozenset(h for h in range(count) if column[h]) for column in columns]
    return users


def _axis_of_heads(axes: Iterable[Tensor]) -> int | None:
    """The axis along which heads (heads, size) touch different indices; of several the one where they share
    least.
    """
    shared = {
        axis: int(rows.sum()) / max(int(rows.any(0).sum()), 1)
        for axis, rows in enumerate(axes)
        if not bool((rows == rows[:1]).all())
    }
    return min(shared, key=lambda axis: shared[axis]) if shared else None
