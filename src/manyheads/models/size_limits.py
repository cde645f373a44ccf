"""Models no larger than the weights they are filled with: a config of a few bytes may ask for terabytes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from manyheads.common.json_files import regular_file

# A cut model is built as it was before the cut, and parts may be made twice.
_TIMES = 20  # what is in the file
_TENSORS, _NUMBERS = 200, 2**26  # and this many on top


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a safetensors file, without reading the tensors."""
    regular_file(path, "weights")
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged, or not weights ({error}); get the model again") from error


@contextmanager
def no_larger_than(path: Path) -> Iterator[None]:
    """Models made inside raise a ValueError when they grow much larger than what is in a safetensors file.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"weight": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    ...     with no_larger_than(Path(folder) / "model.safetensors"):
    ...         nn.ModuleList(nn.Linear(2, 3) for _ in range(10**9))
    Traceback (most recent call last):
    ValueError: the model that its config describes is much larger than its weights, 6 numbers in 1 tensors
    """
    in_file = shapes(path)
    numbers = sum(map(math.prod, in_file.values()))
    seen: set[int] = set()
    total = 0
    thread = threading.get_ident()

    def grow(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is None or threading.get_ident() != thread or id(tensor) in seen:
            return
        seen.add(id(tensor))
        total += tensor.numel()
        if len(seen) > _TIMES * len(in_file) + _TENSORS or total > _TIMES * numbers + _NUMBERS:
            raise ValueError(
                "the model that its config describes is much larger than its weights, "
                f"{numbers:,} numbers in {len(in_file):,} tensors"
            )

    hooks = [
        register_module_parameter_registration_hook(grow),
        register_module_buffer_registration_hook(grow),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
