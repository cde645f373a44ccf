"""What the weights alone say: the subspaces that heads read, and the columns that read heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.heads.diversity.subspaces import angles, bases
from manyheads.heads.projections import Head, Part, Projections, projections, weights
from manyheads.heads.sites import Site

ROLES = ("query", "key", "value")


def found_weights(model: nn.Module, batch: Any) -> dict[str, Projections]:
    """The weights of each head, probed on the first sequence of a batch: where zeros are needs no more."""
    try:
        return projections(model, _first(batch))
    except Exception:  # not every input can be cut along its first axis
        return projections(model, batch)


def _first(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:1]
    if isinstance(batch, Mapping):
        return {name: _first(item) for name, item in batch.items()}
    return tuple(_first(item) for item in batch) if isinstance(batch, tuple | list) else batch


def matrices(model: nn.Module, parts: Sequence[Sequence[Part]]) -> list[Tensor | None]:
    """The weights of some heads of a site (width, d_model) each; None where there are none, or where they
    read inputs of different widths.

    >>> [found.shape for found in matrices(nn.Linear(3, 2), [[Part("weight", 0, (n,))] for n in range(2)])]
    [torch.Size([1, 3]), torch.Size([1, 3])]
    """
    sizes = [sum(len(part.indices) for part in each) for each in parts]
    if not any(sizes):
        return [None] * len(parts)
    try:
        rows = weights(model, [part for each in parts for part in each])
    except RuntimeError:  # they cannot be joined
        return [None] * len(parts)
    return [found if len(found) else None for found in rows.split(sizes)]


def subspace_matrices(
    model: nn.Module, sites: Sequence[Site], found: Mapping[str, Projections], met: Tensor
) -> dict[str, Tensor]:
    """``query_angle``, ``query_orthogonality`` and so on, (heads, heads), in the order of the sites' heads.

    Heads of different sites read the same space only if it is the residual stream, as wide as what they
    write; behind a bottleneck of its own, a site's heads are compared among themselves.
    """
    owner = torch.tensor([n for n, site in enumerate(sites) for _ in range(site.heads)])
    written = _by_head(model, sites, found, "output")
    matrices_found = {}
    for role in ROLES:
        read = _by_head(model, sites, found, role)
        parts = [getattr(head, role) for site in sites for head in _heads(found, site)]
        first = {part: number for number, part in reversed(list(enumerate(parts)))}
        unique = sorted(first.values())  # heads of a group share their keys and values
        which = torch.tensor([unique.index(first[part]) for part in parts])
        stream = torch.tensor(
            [
                into is not None and out is not None and into.shape[1] == out.shape[1]
                for into, out in zip(read, written, strict=True)
            ]
        )
        comparable = met & ((owner[:, None] == owner) | (stream[:, None] & stream))
        spaces = [torch.zeros(0, 0) if into is None else into.cpu() for into in (read[i] for i in unique)]
        for what, values in zip(("angle", "orthogonality"), angles(bases(spaces)), strict=True):
            matrices_found[f"{role}_{what}"] = torch.where(
                comparable, values[which[:, None], which], torch.nan
            )
    return matrices_found


def _by_head(
    model: nn.Module, sites: Sequence[Site], found: Mapping[str, Projections], role: str
) -> list[Tensor | None]:
    """The weights of every head in one role, in the order of the sites."""
    each = ([getattr(head, role) for head in _heads(found, site)] for site in sites)
    return [weight for parts in each for weight in matrices(model, parts)]


def _heads(found: Mapping[str, Projections], site: Site) -> list[Head]:
    return found[site.name].heads if site.name in found else [Head()] * site.heads


def output_columns(
    model: nn.Module, found: Mapping[str, Projections], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """For each site what its output projection makes of the heads, (d_model, heads * d_value); sites whose
    output no single projection reads are left out.
    """
    columns = {}
    for site, (heads, width) in shapes.items():
        rows = matrices(model, [head.output for head in found[site].heads]) if site in found else []
        if len(rows) == heads and all(row is not None and len(row) == width for row in rows):
            columns[site] = torch.cat([row for row in rows if row is not None]).T
    return columns
