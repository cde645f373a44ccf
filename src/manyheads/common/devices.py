"""Devices of models and tensors, and batches on them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from manyheads.common.nested_tensors import map_tensors
from manyheads.common.types import Batch

MovedBatch = TypeVar("MovedBatch")
CPU = torch.device("cpu")
WITHOUT_FLOAT64 = {"mps"}


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter, else of its first buffer, else the CPU.

    For a model whose weights accelerate has offloaded, the device that they come to.

    >>> device_of(nn.Linear(2, 3)), device_of(nn.Identity())
    (device(type='cpu'), device(type='cpu'))
    """
    devices = (tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    device = next(devices, CPU)
    return (_execution_device(model) or device) if device.type == "meta" else device


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate keeps weights of a model elsewhere (on the CPU, on a disk) and brings them for each
    call.

    >>> is_offloaded(nn.Linear(2, 3))
    False
    """
    return any(x.device.type == "meta" for x in model.parameters()) and _execution_device(model) is not None


def _execution_device(model: nn.Module) -> torch.device | None:
    """Where the hooks of accelerate bring the weights."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in (hook, *getattr(hook, "hooks", ())):
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


def for_float64(device: torch.device) -> torch.device:
    """The device for float64 sums of what is computed on a device: the same, or the CPU if it has no float64.

    >>> for_float64(torch.device("mps"))
    device(type='cpu')
    """
    return CPU if device.type in WITHOUT_FLOAT64 else device


def in_float64(x: Tensor) -> Tensor:
    """A tensor in float64, on its device if that supports it (`for_float64`).

    >>> in_float64(torch.ones(1))
    tensor([1.], dtype=torch.float64)
    """
    return x.to(for_float64(x.device)).to(torch.float64)


def to_device(batch: MovedBatch, device: torch.device) -> MovedBatch:
    """A batch with its tensors on a device; lists become tuples, mappings dictionaries.

    >>> to_device({"ids": torch.ones(1), "names": ["a"]}, CPU)
    {'ids': tensor([1.]), 'names': ('a',)}
    """
    moved: MovedBatch = map_tensors(lambda x: x.to(device), batch)
    return moved


def batches_to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, one by one, with their tensors on a device; raises when there are none.

    >>> next(batches_to_device([], CPU))
    Traceback (most recent call last):
    ValueError: batches: expected at least one, got none
    """
    empty = True
    for batch in batches:
        empty = False
        yield to_device(batch, device)
    if empty:
        raise ValueError("batches: expected at least one, got none")


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name; without one, this process's accelerator, or the CPU.

    >>> choose_device("gpu")
    Traceback (most recent call last):
    ValueError: device: got 'gpu'; expected cpu, or the name of an accelerator that torch has here (none)
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return CPU if kind is None else torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        kinds = "none" if kind is None else f"{torch.accelerator.device_count()} x {kind.type}"
        raise ValueError(
            f"device: got {name!r}; expected cpu, or the name of an accelerator that torch has here ({kinds})"
        ) from None
    return device
