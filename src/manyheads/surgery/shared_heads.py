"""One key or value head in place of several: what it computes, and how each head reads it.

A group's keys W_1 x, ..., W_m x become one, W x, and what read W_j x reads A_j W x: queries and readers are
multiplied by A_j, once and for all. A_j is any matrix where nothing forbids it, and a turn with a scale for
each pair of coordinates that rotary positions turn (`head_alignment.Freedom`). W and A_j lose the least, over
the inputs that were seen and weighted by what reads them: the best approximation of low rank of all W_j
together, of which orthogonal Procrustes with a mean is the special case of turns alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.surgery.head_alignment import Freedom


def shared_matrices(
    matrices: Sequence[Tensor], importances: Sequence[Tensor], root: Tensor, freedom: Freedom
) -> tuple[Tensor, list[Tensor]]:
    """The matrix W and the matrices A_j that take the place of several.

    Parameters
    ----------
    matrices: W_j (width, inputs), one for each head that is merged.
    importances: (width, width) for each of them: the second moments of what its outputs are multiplied by.
    root: (inputs, inputs), the square root of the second moments of the inputs (`square_root`).
    freedom: which A_j are allowed. Coordinates that it does not name are averaged.

    Returns
    -------
    W (width, inputs), and A_j (width, width) with W_j close to A_j W.

    Examples
    --------
    Two heads that are the same but for a turn become one without loss.

    >>> w, turn = torch.randn(2, 5).double(), torch.tensor([[0.6, -0.8], [0.8, 0.6]]).double()
    >>> each, inputs = torch.eye(2).double(), torch.eye(5).double()
    >>> one, (a, b) = shared_matrices([w, turn @ w], [each, each], inputs, Freedom((0, 1)))
    >>> torch.allclose(a @ one, w), torch.allclose(b @ one, turn @ w)
    (True, True)
    """
    stacked = torch.stack(list(matrices))  # (m, width, inputs)
    weight = torch.stack(list(importances))  # (m, width, width)
    merged = stacked.mean(0)
    width = merged.shape[0]
    maps = torch.eye(width, dtype=merged.dtype, device=merged.device).repeat(len(matrices), 1, 1)
    if freedom.free:
        index = torch.tensor(freedom.free, device=merged.device)
        merged[index], maps[:, index[:, None], index] = _mix_free(
            stacked[:, index], weight[:, index[:, None], index], root
        )
    if freedom.pairs:
        first, second = (
            torch.tensor(indices, device=merged.device) for indices in zip(*freedom.pairs, strict=True)
        )
        energy = weight.diagonal(dim1=1, dim2=2)
        turned_rows, scale = _turn_pairs(
            torch.complex(stacked[:, first], stacked[:, second]), energy[:, first] + energy[:, second], root
        )
        merged[first], merged[second] = turned_rows.real, turned_rows.imag
        maps[:, first, first] = maps[:, second, second] = scale.real
        maps[:, second, first], maps[:, first, second] = scale.imag, -scale.imag
    return merged, list(maps)


def _mix_free(stacked: Tensor, weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Free coordinates: the best rank-width approximation of all rows (m, width, inputs) together."""
    count, width, _ = stacked.shape
    rows = (square_root(weight) @ stacked).flatten(0, 1)  # (m * width, inputs)
    left, sizes, right = torch.linalg.svd(rows @ root, full_matrices=False)
    sizes = sizes.clamp(min=1e-9 * float(sizes[0]) + 1e-300)
    basis = (left[:, :width] / sizes[:width]).T @ rows  # in the span of the rows, of unit second moments
    maps = stacked @ root @ right[:width].T
    scale = ((stacked @ root).square().sum() / (count * width)).sqrt().clamp(min=1e-300)
    return basis * scale, maps / scale


def _turn_pairs(stacked: Tensor, energy: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of coordinates: for each, the best complex row for all of (m, pairs, inputs)."""
    weighted = (stacked * (energy + 1e-300).sqrt().unsqueeze(-1)).transpose(0, 1)  # (pairs, m, inputs)
    left, sizes, right = torch.linalg.svd(weighted @ root.to(stacked.dtype), full_matrices=False)
    largest = sizes[:, :1].clamp(min=1e-300)
    basis = (left[:, :, :1].mH @ weighted)[:, 0] / largest  # (pairs, inputs)
    scale = torch.einsum("mpi,pi->mp", stacked @ root.to(stacked.dtype), right[:, 0].conj())
    size = (scale.abs().square().mean(0)).sqrt().clamp(min=1e-300)
    return basis * size.unsqueeze(-1), scale / size


def lost_energy(
    matrices: Sequence[Tensor], importances: Sequence[Tensor], root: Tensor, freedom: Freedom
) -> float:
    """The share of the energy of several heads that one in their place loses.

    >>> apart = [torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()]
    >>> round(lost_energy(apart, [torch.eye(1).double()] * 2, torch.eye(2).double(), Freedom((0,))), 6)
    0.5
    """
    one, maps = shared_matrices(matrices, importances, root, freedom)
    gone = total = 0.0
    for matrix, weight, each in zip(matrices, importances, maps, strict=True):
        half = square_root(weight)
        gone += float((half @ (matrix - each @ one) @ root).square().sum())
        total += float((half @ matrix @ root).square().sum())
    return gone / max(total, 1e-300)


def square_root(matrices: Tensor) -> Tensor:
    """The square roots of symmetric matrices (..., width, width) without negative eigenvalues.

    >>> root = square_root(torch.tensor([[5.0, 4.0], [4.0, 5.0]]))
    >>> torch.allclose(root, torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    True
    """
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    root: Tensor = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def groups_by_distance(distance: Tensor, groups: int) -> list[list[int]]:
    """Groups of equal size of things that are close to each other.

    distance: (things, things), symmetric.

    >>> near = torch.tensor([[0.0, 9, 1, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 1, 9, 0]])
    >>> groups_by_distance(near, 2)
    [[0, 2], [1, 3]]
    """
    count = len(distance)
    size = count // groups
    left, chosen = list(range(count)), []
    while left:  # the one that is hardest to place first, with those that are nearest to it
        seed = max(left, key=lambda i: float(distance[i, left].sum()))
        group = [seed]
        while len(group) < size:
            rest = [i for i in left if i not in group]
            group.append(min(rest, key=lambda i: float(distance[i, group].sum())))
        chosen.append(group)
        left = [i for i in left if i not in group]
    return sorted(sorted(group) for group in _exchange_members(distance, chosen))


def _exchange_members(distance: Tensor, groups: list[list[int]]) -> list[list[int]]:
    """Exchange two things at a time while that brings groups closer together."""

    def within(group: list[int]) -> float:
        return float(distance[group][:, group].sum())

    improved = True
    while improved:
        improved = False
        for a in range(len(groups)):
            for b in range(a):
                for i in range(len(groups[a])):
                    for j in range(len(groups[b])):
                        before = within(groups[a]) + within(groups[b])
                        groups[a][i], groups[b][j] = groups[b][j], groups[a][i]
                        if within(groups[a]) + within(groups[b]) < before - 1e-9:
                            improved = True
                        else:
                            groups[a][i], groups[b][j] = groups[b][j], groups[a][i]
    return groups
