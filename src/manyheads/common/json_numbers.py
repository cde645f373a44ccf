"""Numbers for JSON, which has no NaN: null."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def plain(values: object) -> Any:
    """A tensor, a list, a dict or a number for JSON; null for NaN and infinity.

    >>> import torch
    >>> plain(torch.tensor([0.5, torch.nan]))
    [0.5, None]
    """
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values
