"""The losses that come with the package. A loss takes what the model returned and the batch, and returns one
number, or one for each sequence.

Any function of that kind can be given instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Loss = Callable[[Any, Any], Tensor]
IGNORED = -100  # in labels, as transformers has it


def units(loss: Loss, result: Any, batch: Any) -> Tensor:
    """The value of a loss, one for each sequence (batch,) or one for all (1,)."""
    value = loss(result, batch)
    if not isinstance(value, Tensor) or value.dim() > 1 or not value.is_floating_point():
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected a number or one for each sequence, (batch,), got {got}")
    return value.reshape(-1)
