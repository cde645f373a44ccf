"""Tensors inside lists, tuples and mappings, as modules take and give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from manyheads.common.labelled_batch import LabelledBatch


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


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with a function applied to each tensor in it; lists become tuples, mappings dictionaries;
    a `LabelledBatch` stays one.

    >>> import torch
    >>> map_tensors(torch.neg, {"a": torch.tensor(1), "b": [torch.tensor(2), "c"]})
    {'a': tensor(-1), 'b': (tensor(-2), 'c')}
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, LabelledBatch):
        return value.map(lambda item: map_tensors(function, item))
    if isinstance(value, Mapping):
        return {name: map_tensors(function, item) for name, item in value.items()}
    return tuple(map_tensors(function, item) for item in value) if isinstance(value, list | tuple) else value
