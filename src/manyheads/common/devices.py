"""Where models and what they read are kept."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter, or else of its first buffer, or else the CPU.

    >>> device_of(nn.Linear(2, 3)), device_of(nn.Identity())
    (device(type='cpu'), device(type='cpu'))
    """
    return next((tensor.device for held in (model.parameters(), model.buffers()) for tensor in held), CPU)


CPU = torch.device("cpu")
