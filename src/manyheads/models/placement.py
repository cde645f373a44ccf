"""How a model is opened: on which device, in which numbers, with which attention, of which revision."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyheads.common.devices import choose_device
from manyheads.common.errors import first_line

_DTYPES = {"float32", "float16", "bfloat16", "float64"}
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Placement:
    """How a model is opened; None for what is left to the model. Made by `choose_placement`, which checks it.

    dtype: of its weights; ``"auto"`` for that of its files.
    device_map: as ``from_pretrained`` of transformers takes it.
    """

    device: torch.device
    dtype: torch.dtype | str | None = None
    device_map: str | dict[str, Any] | None = None
    attention: str | None = None
    revision: str | None = None

    def refuse(self, name: str, *options: str) -> None:
        """Raise for options that a model of this kind cannot take."""
        for option in options:
            if getattr(self, option) is not None:
                raise ValueError(
                    f"{option.replace('_', '-')}: got {getattr(self, option)!r} for {name}; only models of "
                    f"transformers{' on the hub' if option == 'revision' else ''} take it: leave it out"
                )

    def apply(self, model: nn.Module, name: str) -> None:
        """Give a model that is already made its numbers, attention and device."""
        if self.attention is not None:
            if not hasattr(model, "set_attn_implementation"):
                self.refuse(name, "attention")
            check_attention(self.attention)
            try:
                model.set_attn_implementation(self.attention)  # type: ignore[operator]
            except Exception as error:
                raise ValueError(not_installed(self.attention, error)) from error
        if isinstance(self.dtype, torch.dtype):
            model.to(self.dtype)
        model.to(self.device)


def choose_placement(
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, object] | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Placement:
    """What these options ask for, checked before anything is loaded.

    >>> choose_placement("cpu", "bfloat16").dtype
    torch.bfloat16
    """
    if device is not None and device_map is not None:
        raise ValueError(
            f"device-map: got {device_map!r} beside device {device!r}; give one of them: a map names devices"
        )
    target = choose_device(device)
    kind = _dtype(dtype, target)
    return Placement(target, kind, _device_map(device_map), attention, revision)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str | None:
    if dtype is None or dtype == "auto":
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype: got {name!r}; expected auto, {', '.join(sorted(_DTYPES))}")
    kind: torch.dtype = getattr(torch, name)
    try:
        square = torch.ones(2, 2, dtype=kind, device=device)
        (square @ square).sum().item()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"dtype: got {name}, which the device {device} does not have ({first_line(error)}); "
            "expected float32, or another dtype or device"
        ) from None
    return kind


def _device_map(device_map: str | dict[str, object] | None) -> str | dict[str, object] | None:
    if device_map is None:
        return None
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("device-map: needs the package accelerate: pip install 'manyheads[train]'")
    if isinstance(device_map, dict) or device_map in _MAPS:
        return device_map
    if device_map.lstrip().startswith("{"):
        try:
            parsed = json.loads(device_map)
        except json.JSONDecodeError as error:
            raise ValueError(f"device-map: got {device_map!r}, which is not JSON ({error})") from None
        return {str(name): device for name, device in parsed.items()}
    try:
        return {"": str(choose_device(device_map))}
    except ValueError:
        raise ValueError(
            f"device-map: got {device_map!r}; expected {', '.join(_MAPS)}, a device, or JSON from modules to "
            "devices"
        ) from None


def check_attention(name: str) -> None:
    """Raise for an attention implementation that transformers does not have."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = ("eager", *ALL_ATTENTION_FUNCTIONS)
    if name not in names and "/" not in name:
        raise ValueError(
            f"attention: got {name!r}; expected {', '.join(sorted(names))}, or a kernel on the hub "
            "(owner/name)"
        )


def not_installed(attention: str, error: Exception) -> str:
    """What to say of an attention implementation that cannot be used here."""
    return (
        f"attention: {attention} cannot be used here ({first_line(error)}); install what it needs, or take "
        "sdpa, which is part of torch"
    )
