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


def matrix(model: nn.Module, parts: Sequence[Part]) -> Tensor | None:
    """The weights of a head (width, d_model), or None where they are of several spaces, or none.

    >>> matrix(nn.Linear(3, 2), [Part("weight", axis=0, indices=(1,))]).shape
    torch.Size([1, 3])
    """
    if not parts:
        return None
    try:
        return weights(model, parts)
    except RuntimeError:  # parts that read inputs of different widths
        return None


def subspace_matrices(
    model: nn.Module, sites: Sequence[Site], found: Mapping[str, Projections], met: Tensor
) -> dict[str, Tensor]:
    """``query_angle``, ``query_orthogonality`` and so on, (heads, heads), in the order of the sites' heads.

    Heads of different sites read the same space only if it is the residual stream, as wide as what they
    write; behind a bottleneck of its own, a site's heads are compared among themselves.
    """
    owner = torch.tensor([n for n, site in enumerate(sites) for _ in range(site.heads)])
    heads = [head for site in sites for head in _heads(found, site)]
    written = [matrix(model, head.output) for head in heads]
    matrices = {}
    for role in ROLES:
        parts: list[tuple[Part, ...]] = [getattr(head, role) for head in heads]
        unique = list(dict.fromkeys(parts))  # heads of a group share their keys and values
        read = [matrix(model, part) for part in unique]
        which = torch.tensor([unique.index(part) for part in parts])
        widths = [None if matrix is None else matrix.shape[1] for matrix in read]
        stream = torch.tensor(
            [out is not None and widths[i] == out.shape[1] for i, out in zip(which, written, strict=True)]
        )
        comparable = met & ((owner[:, None] == owner) | (stream[:, None] & stream))
        found_angles = angles(bases([torch.zeros(0, 0) if x is None else x.cpu() for x in read]))
        for name, values in zip((f"{role}_angle", f"{role}_orthogonality"), found_angles, strict=True):
            matrices[name] = torch.where(comparable, values[which[:, None], which], torch.nan)
    return matrices


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
        rows = [matrix(model, head.output) for head in found[site].heads] if site in found else []
        if len(rows) == heads and all(row is not None and len(row) == width for row in rows):
            columns[site] = torch.cat([row for row in rows if row is not None]).T
    return columns
