"""Tensors inside lists, tuples and mappings, as modules take and give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value, in order.

    >>> import torch
    >>> [x.item() for x in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "c"]})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
