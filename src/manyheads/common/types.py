"""The types that every room takes and gives: batches, heads, JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

# What a model runs on: keyword arguments, positional arguments, or one tensor.
Batch: TypeAlias = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor

# What a model returns: a tensor, a tuple of them, an object with names.
ModelOutput: TypeAlias = Any

# Heads by layer number or site name: {3: [5, 7], "encoder.layer.4.attention.self": [0]}.
Heads: TypeAlias = (
    Mapping[int | str, Iterable[int]] | Mapping[int, Iterable[int]] | Mapping[str, Iterable[int]]
)

# What a JSON file holds.
Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

# A JSON object whose reader knows its fields: a record, a config, a state that is saved.
JsonObject: TypeAlias = dict[str, Any]

# What torch hands to a function mode or a hook: a function, its arguments by position, those by name.
Function: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
