"""A device that has no float64, pretended on the CPU: what Apple's MPS is like, for machines without one.

Tensors on it are wrappers around tensors of the CPU. They say that their device is ``mps``, mix with no other
tensor of more than one number, and cannot be float64.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretended")
DEVICE = torch.device("pretended", 0)
_library = torch.library.Library("aten", "IMPL")
reads: list[str] = []  # what made the host wait for the device
_READS = ("_local_scalar_dense", "equal", "nonzero", "_to_copy", "copy_")


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source, target, non_blocking=False):
    (target.held if isinstance(target, OnDevice) else target).copy_(getattr(source, "held", source))
    return target


_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


class OnDevice(torch.Tensor):
    """A tensor on the pretended device."""

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        if held.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it"
            )
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=DEVICE, requires_grad=held.requires_grad,
        )  # fmt: skip

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held.detach()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        return self.held.tolist()

    def __repr__(self) -> str:
        return f"on the pretended device: {self.held}"


class Pretended(TorchDispatchMode):
    """Tensors that are asked for on the device are made there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    there = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    ours = [x for x in there if isinstance(x, OnDevice)]
    name = func.overloadpacket.__name__
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    moves = name in ("_to_copy", "copy_")
    to_host = (
        target is not None and target.type == "cpu"
        if name == "_to_copy"
        else not isinstance(args[0], OnDevice)
    )
    if ours and name in _READS and (to_host or not moves):
        reads.append(name)
    if ours and not moves and any(x.dim() and x.device.type == "cpu" for x in there):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    plain_args, plain_kwargs = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
    if target is not None:
        plain_kwargs = plain_kwargs | {"device": "cpu"}
    out = func(*plain_args, **plain_kwargs)
    on_device = target == DEVICE if target is not None else bool(ours)
    if name == "copy_":
        return args[0]
    if name in ("_local_scalar_dense", "equal", "is_same_size"):
        return out
    if on_device:
        out = tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, out)
    return out


def moved(x):
    """A tensor, a module or what holds them, on the device."""
    if isinstance(x, torch.nn.Module):
        for module in x.modules():
            for key, value in module._parameters.items():
                if value is not None:
                    module._parameters[key] = torch.nn.Parameter(OnDevice(value.data), value.requires_grad)
            for key, value in module._buffers.items():
                if value is not None:
                    module._buffers[key] = OnDevice(value)
        return x
    return tree_map(lambda y: OnDevice(y) if isinstance(y, torch.Tensor) else y, x)
