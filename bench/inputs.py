"""Tensors to attend with, and the two calls that every part times: forward, and forward+backward."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

MODES = ("forward", "forward+backward")


def heads_of(batch: int, heads: int, length: int, width: int) -> Tensor:
    """(batch, heads, length, width) laid out as a projection leaves it: the heads of a token side by side."""
    return torch.randn(batch, length, heads, width).transpose(1, 2)


def timed(
    mode: str, function: Callable[..., Tensor], inputs: Iterable[Tensor], parameters: Iterable[Tensor] = ()
):
    """A call without arguments that runs `function(*inputs)`.

    With backward it also takes the gradients of inputs and parameters, allocated anew each time, as a
    training step does after zero_grad.
    """
    if mode == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return function(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    wanted = [*leaves, *parameters]
    gradient = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), wanted, gradient)
