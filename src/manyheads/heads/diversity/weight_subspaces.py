"""What the weights alone show: the subspaces that heads read, and the columns that read heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from manyheads.capture.site import Site
from manyheads.capture.weights import Head, Part, Projections, projections, weights
from manyheads.common.devices import in_float64
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.types import Batch

ROLES = ("query", "key", "value")


def head_projections(model: nn.Module, batch: Batch) -> dict[str, Projections]:
    """The weights of each head, probed on the first sequence of a batch, which is enough to see zeros."""
    try:
        return projections(model, map_tensors(lambda x: x[:1], batch))
    except Exception:  # not every input can be cut along its first axis
        return projections(model, batch)


def matrices(model: nn.Module, parts: Sequence[Sequence[Part]]) -> list[Tensor | None]:
    """The weights of some heads of a site (width, d_model) each; None where there are none, or where they
    read inputs of different widths.

    >>> [matrix.shape for matrix in matrices(nn.Linear(3, 2), [[Part("weight", 0, (n,))] for n in range(2)])]
    [torch.Size([1, 3]), torch.Size([1, 3])]
    """
    sizes = [sum(len(part.indices) for part in each) for each in parts]
    if not any(sizes):
        return [None] * len(parts)
    try:
        rows = weights(model, [part for each in parts for part in each])
    except RuntimeError:  # they cannot be joined
        return [None] * len(parts)
    return [matrix if len(matrix) else None for matrix in rows.split(sizes)]


def subspace_matrices(
    model: nn.Module, sites: Sequence[Site], projections_by_site: Mapping[str, Projections]
) -> dict[str, Tensor]:
    """``query_angle``, ``query_orthogonality`` and so on, (heads, heads), in the order of the sites' heads,
    whether they met or not.

    Heads of different sites read the same space only if it is the residual stream, as wide as what they
    write; behind a bottleneck of its own, a site's heads are compared among themselves.
    """
    owner = torch.tensor([n for n, site in enumerate(sites) for _ in range(site.heads)])
    written = _by_head(model, sites, projections_by_site, "output")
    angles_by_role = {}
    for role in ROLES:
        read = _by_head(model, sites, projections_by_site, role)
        parts = [getattr(head, role) for site in sites for head in _heads(projections_by_site, site)]
        first = {part: number for number, part in reversed(list(enumerate(parts)))}
        unique = sorted(first.values())  # heads of a group share their keys and values
        unique_index = torch.tensor([unique.index(first[part]) for part in parts])
        stream = torch.tensor(
            [
                read_space is not None and out is not None and read_space.shape[1] == out.shape[1]
                for read_space, out in zip(read, written, strict=True)
            ]
        )
        comparable = (owner[:, None] == owner) | (stream[:, None] & stream)
        spaces = [
            torch.zeros(0, 0) if read_space is None else read_space.cpu()
            for read_space in (read[i] for i in unique)
        ]
        for measure, values in zip(("angle", "orthogonality"), angles(bases(spaces)), strict=True):
            angles_by_role[f"{role}_{measure}"] = torch.where(
                comparable, values[unique_index[:, None], unique_index], torch.nan
            )
    return angles_by_role


def _by_head(
    model: nn.Module, sites: Sequence[Site], projections_by_site: Mapping[str, Projections], role: str
) -> list[Tensor | None]:
    """The weights of every head in one role, in the order of the sites."""
    each = ([getattr(head, role) for head in _heads(projections_by_site, site)] for site in sites)
    return [weight for parts in each for weight in matrices(model, parts)]


def _heads(projections_by_site: Mapping[str, Projections], site: Site) -> list[Head]:
    return projections_by_site[site.name].heads if site.name in projections_by_site else [Head()] * site.heads


def output_columns(
    model: nn.Module, projections_by_site: Mapping[str, Projections], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """For each site what its output projection makes of the heads, (d_model, heads * d_value); sites whose
    output no single projection reads are left out.
    """
    columns = {}
    for site, (heads, width) in shapes.items():
        rows = (
            matrices(model, [head.output for head in projections_by_site[site].heads])
            if site in projections_by_site
            else []
        )
        if len(rows) == heads and all(row is not None and len(row) == width for row in rows):
            columns[site] = torch.cat([row for row in rows if row is not None]).T
    return columns


def bases(weights: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis (d_model, rank) of the row space of each weight matrix (width, d_model), float64.

    >>> [basis.shape for basis in bases([torch.randn(3, 7), torch.ones(3, 7)])]
    [torch.Size([7, 3]), torch.Size([7, 1])]
    """
    orthonormal: list[Tensor] = [torch.empty(0)] * len(weights)
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, weight in enumerate(weights):
        if weight.numel():
            alike.setdefault(tuple(weight.shape), []).append(number)
    for numbers in alike.values():
        stack = torch.stack([in_float64(weights[number].detach()) for number in numbers])
        precision = torch.finfo(torch.float32).eps * max(stack.shape[1:])
        # eigenvectors of (width, width) at once, not singular vectors of (width, d_model) one by one
        values, vectors = torch.linalg.eigh(stack @ stack.transpose(1, 2))
        sizes = values.clamp(min=0.0).sqrt()
        for number, weight, size, vector in zip(numbers, stack, sizes, vectors, strict=True):
            significant = size > precision * size[-1]
            orthonormal[number] = torch.linalg.qr(weight.T @ (vector[:, significant] / size[significant]))[0]
    return orthonormal


def angles(spanned: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean principal angle in degrees of every pair of subspaces, and how orthogonal they are.

    A pair has as many principal angles as the smaller subspace has dimensions. Orthogonality is the mean of
    their squared sines: 0 when one subspace lies within the other, 1 when nothing that one head reads is
    read by the other. Two random subspaces of w out of d dimensions have 1 - w / d.
    Subspaces of different spaces have no angles: NaN.

    >>> x, y, z = torch.eye(3, dtype=torch.float64).split(1)
    >>> degrees, orthogonal = angles(bases([torch.cat([x, y]), torch.cat([x, z])]))
    >>> degrees[0], orthogonal[0]
    (tensor([ 0., 45.], dtype=torch.float64), tensor([0.0000, 0.5000], dtype=torch.float64))
    """
    degrees = torch.full((len(spanned), len(spanned)), torch.nan, dtype=torch.float64)
    orthogonal = degrees.clone()
    spaces: dict[int, list[int]] = {}
    for number, basis in enumerate(spanned):
        if basis.numel():
            spaces.setdefault(len(basis), []).append(number)
    for numbers in spaces.values():
        ranks = torch.tensor([spanned[number].shape[1] for number in numbers])
        widest = int(ranks.max())
        stack = torch.stack(
            [pad(spanned[number], (0, widest - spanned[number].shape[1])) for number in numbers]
        )
        for i, number in enumerate(numbers):
            cosines = torch.linalg.svdvals(stack[i].T @ stack[i:]).clamp(max=1.0)  # (heads, widest)
            counts = ranks[i:].clamp(max=ranks[i])
            within = torch.arange(widest) < counts[:, None]
            angle = torch.where(within, torch.rad2deg(torch.arccos(cosines)), 0.0).sum(1) / counts
            sine = 1 - cosines.square().sum(1) / counts
            others = torch.tensor(numbers[i:])
            degrees[number, others] = degrees[others, number] = angle
            orthogonal[number, others] = orthogonal[others, number] = sine.clamp(min=0.0)
    return degrees, orthogonal
