"""Per-head settings of a module apart from its weights: windows, slopes, look-aheads.

They stand in lists, tuples, dicts by head number, or tensors. Those that a gradient finds are weights, and go
with their head like those (`weight_slices`); the others are found by their size here, and follow their heads
where the module is wrong without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from manyheads.models.changes import followed
from manyheads.surgery.attribute_tracing import Reads
from manyheads.surgery.head_count_search import Candidate

# A list, a tuple, a dict by head number, or a tensor, with one entry for each head.
Setting = list[object] | tuple[object, ...] | dict[int, object] | Tensor


def settings(
    modules: Mapping[str, nn.Module], reads: Reads, sources: Mapping[int, list[int]], weights: set[str]
) -> list[Candidate]:
    """Attributes that these modules read and that have as many entries as there are heads or key heads.

    sources: for each such number, which of them those after the change come from.
    weights: names of the parameters and buffers that gradients account for.
    """
    per_head = []
    for path, module in modules.items():
        for name, value in _attributes(module):
            if name not in reads.get(path, ()) or f"{path}.{name}".lstrip(".") in weights:
                continue
            follows = [
                (axis, size, followed(value, axis, heads))
                for size, heads in sources.items()
                for axis in _axes(value, size)
            ]
            if follows:
                axes = tuple((axis, size) for axis, size, _ in follows)
                options = (value, *(new for _, _, new in follows))
                per_head.append(Candidate(path, (name,), options, value, axes=axes))
    return per_head


def _attributes(module: nn.Module) -> Iterator[tuple[str, Setting]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, list | tuple | dict | Tensor):
            yield name, value
    not_torch = not type(module).__module__.startswith("torch.nn.")
    for name, tensor in (*module._buffers.items(), *module._parameters.items()):
        if not_torch and tensor is not None:
            yield name, tensor


def _axes(value: Setting, size: int) -> list[int]:
    """The axes along which there is one entry for each of ``size`` heads."""
    if isinstance(value, Tensor):
        return [axis for axis in range(value.dim()) if value.shape[axis] == size]
    if isinstance(value, dict):
        return [0] if list(value) == list(range(size)) else []
    return [0] if len(value) == size else []


def begins_alike(one: Setting, other: Setting) -> bool:
    """Whether a setting begins as another does: then no batch can tell them apart.

    >>> begins_alike([3, 3, 5], [3, 3]), begins_alike([3, 4, 5], [3, 5]), begins_alike([3, 5], [3, 5, 5])
    (True, False, True)
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        part = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
        return torch.equal(one[part], other[part])
    if isinstance(one, dict) and isinstance(other, dict):
        return all(one[key] == other[key] for key in one.keys() & other.keys())
    return all(a == b for a, b in zip(one, other, strict=False))


def largest_number(value: object) -> int:
    """The largest number in a setting, as far as it may be a length.

    >>> largest_number([4, None, 16.0, float("inf")])
    16
    """
    if isinstance(value, Tensor):
        value = value.flatten().tolist() if value.numel() <= 4096 else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return max((largest_number(item) for item in value), default=0)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6:
        return abs(int(value))
    return 0
