"""Tensors without data that stand for cached keys or values while a model carries them to its attention.

A cache whose heads hold different numbers of keys has no tensor (batch, heads, length, width) to return. It
returns two of these instead. They have the shape that a full cache would have; the one thing that can be done
with them is attention: scaled_dot_product_attention, or ours. Everything else raises an error, so that no
model computes with keys that are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.common.types import Arguments, Function, Keywords
from manyheads.nn.attention import attention, check_mask
from manyheads.nn.mask import Mask

SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.is_contiguous,
    Tensor.stride,
    Tensor.get_device,
}


class Holder(Protocol):
    """What holds the keys: the layer of a cache."""

    def attend(self, q: Tensor, mask: Mask, scale: float | None, dropout: float) -> Tensor:
        """The attention of q (batch, heads, new, width) over everything held and the keys that came last."""


class StandIn(Tensor):
    """Stands for the keys, or the values, of a cache (batch, kv_heads, length, width).

    Grouped heads may be repeated for their queries on the way, as `repeat_kv` of transformers does it.

    >>> class Zeros:
    ...     def attend(self, q, mask, scale, dropout):
    ...         return torch.zeros_like(q)
    >>> k, v = stand_ins(Zeros(), torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), length=500)
    >>> k.shape, F.scaled_dot_product_attention(torch.ones(1, 4, 1, 8), k, v, enable_gqa=True).shape
    (torch.Size([1, 2, 500, 8]), torch.Size([1, 4, 1, 8]))
    """

    holder: Holder
    kind: str  # "keys" or "values"
    repeats: int  # 0 while the axis along which it is repeated stands apart

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is attention:
            return _attend_manyheads(*args, **kwargs)
        if func in SDPA:
            return _attend_fused(dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs)
        repeated = _repeat_heads(func, args, kwargs) if args and isinstance(args[0], StandIn) else None
        if repeated is None:
            name = getattr(func, "__name__", str(func))
            raise ValueError(
                f"cache: the model does {name!r} with the keys or values of a cache whose heads forget; "
                "expected it to hand them to scaled_dot_product_attention: load it with "
                "attn_implementation='sdpa', or use a full cache"
            )
        return repeated

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StandIn({self.kind}, {tuple(self.shape)})"


def stand_ins(holder: Holder, k: Tensor, v: Tensor, length: int) -> tuple[StandIn, StandIn]:
    """What stands for all keys and all values when the new ones are k and v (batch, kv_heads, new, width)."""
    sizes = ((x.shape[0], x.shape[1], length, x.shape[3]) for x in (k, v))
    keys, values = (
        _stand_in(holder, name, size, x, 1)
        for name, size, x in zip(("keys", "values"), sizes, (k, v), strict=True)
    )
    return keys, values


def _stand_in(holder: Holder, name: str, size: Any, like: Tensor, repeats: int) -> StandIn:
    nan = torch.full((1,), torch.nan, dtype=like.dtype, device=like.device)  # noticed, if it were read
    stand_in = nan.expand(tuple(size)).as_subclass(StandIn)
    stand_in.holder, stand_in.kind, stand_in.repeats = holder, name, repeats
    return stand_in


def _repeat_heads(func: Function, args: Arguments, kwargs: Keywords) -> StandIn | None:
    """The stand-in after a step of repeating its heads for groups of queries; None if it is none."""
    x: StandIn = args[0]
    rest = args[1:]
    shape = tuple(x.shape)
    if func is Tensor.contiguous:
        return x
    if func is Tensor.to and not kwargs and all(value in (x.dtype, x.device) for value in rest):
        return x
    if func is Tensor.__getitem__ and _adds_axis(rest[0]) and x.repeats == 1:
        return _stand_in(x.holder, x.kind, (*shape[:2], 1, *shape[2:]), x, 0)
    sizes = tuple(rest[0]) if rest and isinstance(rest[0], tuple | list) else rest
    if func is Tensor.expand and x.repeats == 0 and len(sizes) == 5:
        new_shape = tuple(old if size == -1 else size for old, size in zip(shape, sizes, strict=True))
        if new_shape[:2] + new_shape[3:] == shape[:2] + shape[3:]:
            return _stand_in(x.holder, x.kind, new_shape, x, 0)
    merged_shape = (shape[0], shape[1] * shape[2], *shape[3:])
    if func in (Tensor.reshape, Tensor.view, torch.reshape) and x.repeats == 0 and sizes == merged_shape:
        return _stand_in(x.holder, x.kind, merged_shape, x, shape[2])
    if func in (torch.repeat_interleave, Tensor.repeat_interleave) and x.repeats == 1:
        options = dict(zip(("repeats", "dim"), rest, strict=False)) | kwargs
        times = options.get("repeats")
        if isinstance(times, int) and options.get("dim") in (1, -3) and len(options) == 2:
            return _stand_in(x.holder, x.kind, (shape[0], shape[1] * times, *shape[2:]), x, times)
    return None


def _adds_axis(index: object) -> bool:
    whole = slice(None)
    return (
        isinstance(index, tuple)
        and index[:3] == (whole, whole, None)
        and all(part == whole or part is Ellipsis for part in index[3:])
    )


def _attend_manyheads(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Tensor | None = None, causal: bool = False,
    window: int | None = None, chunk: int | None = None, scale: float | None = None, dropout: float = 0.0,
    kernel: str = "auto",
) -> Tensor:  # fmt: skip
    if window is not None or chunk is not None:
        raise ValueError("cache: the heads of a module with a window or chunks cannot forget more; leave it")
    return _attend(q, k, v, check_mask(q, k, mask, causal, None, None), scale, dropout)


def _attend_fused(arguments: Keywords) -> Tensor:
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    mask, causal = arguments.get("attn_mask"), bool(arguments.get("is_causal"))
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            "cache: the model's causal mask is not aligned at the last key; give it a full cache"
        )
    conditions = check_mask(q, k, mask, causal, None, None)
    return _attend(q, k, v, conditions, arguments.get("scale"), arguments.get("dropout_p", 0.0))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, dropout: float) -> Tensor:
    if not isinstance(k, StandIn) or not isinstance(v, StandIn) or k.holder is not v.holder:
        raise ValueError(
            "cache: the model mixes keys and values of different caches; expected those of one layer"
        )
    if (k.kind, v.kind) != ("keys", "values"):
        raise ValueError(f"cache: the model attends to {k.kind} with {v.kind}; expected keys with values")
    if k.repeats != v.repeats or (k.repeats > 1 and k.shape[1] != q.shape[1]) or not k.repeats:
        raise ValueError(
            f"cache: {q.shape[1]} heads of queries do not fit {k.shape[1]} of keys, {v.shape[1]} of values"
        )
    if q.shape[2] > 1 and _looks_ahead(mask, q.shape[2], k.shape[2], q.device):
        raise ValueError("cache: the model looks ahead in its attention; expected a causal model")
    return k.holder.attend(q, mask, scale, dropout)


def _looks_ahead(mask: Mask, queries: int, keys: int, device: torch.device) -> bool:
    """Whether the first of several queries sees keys behind its own."""
    if mask.causal:
        return False
    offset = keys - queries
    allowed, bias = mask.rectangle(range(1), range(offset + 1, keys), offset, device)
    if bias is not None and not bool((bias > -1e4).any()):
        return False
    return allowed is None or bool(allowed.any())
