"""Where the elements of a leaf go: the index along each axis of a later tensor, found by differentiating it.

Which index along an axis of the tensor an element of a leaf goes to is written into the cotangents: index i
of n counts 1 + i / n times, and the ratio to the plain gradient says i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from manyheads.capture.dependence import Leaf

MIXED = -2  # an element that goes to several indices
UNUSED = -1  # an element that goes nowhere
_WHOLE = 512  # indices that the cotangents of one gradient can tell apart
_PIECE = 2**22  # elements of a leaf that are looked at together


def destinations(tensor: Tensor, axes: Sequence[int], leaves: Sequence[Leaf]) -> list[Tensor]:
    """For each leaf, the index along each axis of ``tensor`` that each of its elements goes to: (axes, *shape
    of the leaf), `UNUSED` or `MIXED` where there is no such one.
    """
    inputs = [leaf.tensor for leaf in leaves]
    start = cotangent(tensor)
    gradients = _gradients(tensor, inputs, start)
    sizes = [tensor.shape[axis] for axis in axes]
    if math.prod(sizes) <= _WHOLE and torch.finfo(tensor.dtype).eps < 1e-5:
        joint_indices = _indices(tensor, leaves, axes, start, gradients)
        if not any(_is_often_mixed(index) for index in joint_indices):  # few are, by rounding
            return [_unravel(index, sizes) for index in joint_indices]
    axis_indices = [_indices(tensor, leaves, [axis], start, gradients) for axis in axes]
    return [torch.stack([indices[number] for indices in axis_indices]) for number in range(len(inputs))]


def _gradients(tensor: Tensor, inputs: Sequence[Tensor], start: Tensor) -> Sequence[Tensor | None]:
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        tensor, inputs, start, retain_graph=True, allow_unused=True
    )
    return gradients


def _indices(
    tensor: Tensor,
    leaves: Sequence[Leaf],
    axes: Sequence[int],
    start: Tensor,
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """The index that each element of each leaf goes to, counted over these axes of ``tensor`` together."""
    inputs = [leaf.tensor for leaf in leaves]
    base, slack = (_WHOLE, 0.05) if torch.finfo(tensor.dtype).eps < 1e-5 else (4, 0.3)
    shape = [size if axis in axes else 1 for axis, size in enumerate(tensor.shape)]
    size, unit = math.prod(shape), 1
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    positions = torch.arange(size, device=tensor.device).view([tensor.shape[axis] for axis in axes])
    positions = positions.permute(order).reshape(shape)
    result = [torch.full(x.shape, UNUSED, dtype=torch.int32) for x in inputs]
    used = [None if g is None else _is_used(g, leaf) for g, leaf in zip(gradients, leaves, strict=True)]
    while unit == 1 or unit < size:
        factor = (1 + positions // unit % base / base).to(tensor.dtype)
        coded_gradients = _gradients(tensor, inputs, start * factor)
        for indices, g, c, alive in zip(result, gradients, coded_gradients, used, strict=True):
            if g is None or c is None or alive is None:
                continue
            pieces = (x.flatten().split(_PIECE) for x in (indices, g, c, alive))
            for out, g_piece, c_piece, alive_piece in zip(*pieces, strict=True):
                ratio = (in_double(c_piece) / in_double(torch.where(alive_piece, g_piece, 1)) - 1) * base
                index = ratio.round()
                index = torch.where((ratio - index).abs() < slack, index, -1).int()
                index = torch.where((index >= 0) & (index < base), index, MIXED)
                sums = torch.where((out == MIXED) | (index == MIXED), MIXED, out.clamp(min=0) + index * unit)
                out.copy_(torch.where(alive_piece.cpu(), sums, UNUSED))
        unit *= base
    for index in result:
        index[index >= size] = MIXED
    return result


def _is_often_mixed(index: Tensor) -> bool:
    """Whether more elements go to several indices than rounding makes it seem."""
    return int((index == MIXED).sum()) * 100 > int((index != UNUSED).sum())


def _unravel(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """The index along each axis, of indices over all of them."""
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    parts = [index // step % size for step, size in zip(steps, sizes, strict=True)]
    return torch.stack([torch.where(index < 0, index, part) for part in parts])


def in_double(tensor: Tensor) -> Tensor:
    """In float64, on the CPU: some devices have none."""
    return tensor.detach().cpu().double()


def _is_used(gradient: Tensor, leaf: Leaf) -> Tensor:
    """Where a gradient is not zero but for rounding, among those of the same row of weights."""
    size = gradient.abs()
    if not size.numel():
        return size.bool()
    rows = {axis % size.dim() for axis in leaf.rows}
    data = [axis for axis in range(size.dim()) if axis not in rows]
    largest = size.amax(data, keepdim=True) if data else size
    # Where products nearly cancel, as in rotations, half precision leaves nothing to divide.
    least = 1e-4 if torch.finfo(gradient.dtype).eps < 1e-5 else 0.2
    return (size > least * largest) & (largest > 1e-6 * size.max())


def cotangent(tensor: Tensor) -> Tensor:
    """Positive numbers without pattern, the same each time, shaped like a tensor."""
    steps = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float32)
    return torch.cos(steps * steps * 0.7 % 6.2831853).mul(0.45).add(1.0).to(tensor.dtype).view(tensor.shape)
