"""Where heads read: the angles between the subspaces of the residual stream that their weights pick out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from manyheads.common.devices import in_float64


def bases(weights: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis (d_model, rank) of the row space of each weight matrix (width, d_model), float64.

    >>> [basis.shape for basis in bases([torch.randn(3, 7), torch.ones(3, 7)])]
    [torch.Size([7, 3]), torch.Size([7, 1])]
    """
    found: list[Tensor] = [torch.empty(0)] * len(weights)
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
            kept = size > precision * size[-1]
            found[number] = torch.linalg.qr(weight.T @ (vector[:, kept] / size[kept]))[0]
    return found


def angles(found: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
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
    degrees = torch.full((len(found), len(found)), torch.nan, dtype=torch.float64)
    orthogonal = degrees.clone()
    spaces: dict[int, list[int]] = {}
    for number, basis in enumerate(found):
        if basis.numel():
            spaces.setdefault(len(basis), []).append(number)
    for numbers in spaces.values():
        ranks = torch.tensor([found[number].shape[1] for number in numbers])
        widest = int(ranks.max())
        stack = torch.stack([pad(found[number], (0, widest - found[number].shape[1])) for number in numbers])
        for i, number in enumerate(numbers):
            cosines = torch.linalg.svdvals(stack[i].T @ stack[i:]).clamp(max=1.0)  # (heads, widest)
            counts = ranks[i:].clamp(max=ranks[i])
            there = torch.arange(widest) < counts[:, None]
            angle = torch.where(there, torch.rad2deg(torch.arccos(cosines)), 0.0).sum(1) / counts
            sine = 1 - cosines.square().sum(1) / counts
            others = torch.tensor(numbers[i:])
            degrees[number, others] = degrees[others, number] = angle
            orthogonal[number, others] = orthogonal[others, number] = sine.clamp(min=0.0)
    return degrees, orthogonal
