"""Training a compiled model: compiled in place, so that its names, checkpoints and type stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from manyheads.common.errors import first_line


def compile_in_place(model: nn.Module, device: torch.device) -> None:
    """Let ``model(...)`` run through torch.compile; the first calls take a minute.

    Raises ValueError, before anything else is done, where nothing can be compiled for this device: on a CPU,
    that takes a C++ compiler.
    """
    torch._dynamo.reset()  # graphs of models that came before count towards a limit
    try:
        torch.compile(_one_more)(torch.zeros(2, device=device))
    except Exception as error:  # which one depends on what is missing
        cause = getattr(error, "inner_exception", error)
        raise ValueError(
            f"compile: torch cannot compile for {device.type} here ({first_line(cause)}); install a compiler "
            "(Debian: apt-get install g++; GPUs: Triton), or train without compile"
        ) from None
    model.compile()


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def uncompile(model: nn.Module) -> nn.Module:
    """The same model, no longer compiled in place."""
    for module in model.modules():
        module._compiled_call_impl = None
    return model


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A context in which a model that was compiled in place runs as its class says.

    >>> layer = nn.Linear(2, 3)
    >>> layer.compile()
    >>> with uncompiled(layer):
    ...     layer._compiled_call_impl is None
    True
    """
    calls = [(module, module._compiled_call_impl) for module in model.modules()]
    uncompile(model)
    try:
        yield
    finally:
        for module, call in calls:
            module._compiled_call_impl = call
