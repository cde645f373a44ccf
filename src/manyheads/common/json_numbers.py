"""Numbers for JSON: null where there is no number."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def plain(values: object) -> Any:
    """A tensor, a list or a number for JSON: null where there is no number.

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
