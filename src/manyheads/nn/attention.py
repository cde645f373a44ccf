"""The attention function: softmax(q k^T * scale + bias) v, by a kernel that is exact and fast for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from manyheads.nn.few_weights import attend_in_memory, has_few_weights
from manyheads.nn.fused import fused, saves_masks
from manyheads.nn.mask import Mask, as_mask, check
from manyheads.nn.mask import chunk as chunk_mask
from manyheads.nn.mask import window as window_mask
from manyheads.nn.reference import reference
from manyheads.nn.tiled import tiled

Kernel = Literal["auto", "reference", "fused", "tiled"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    kernel: Kernel = "auto",
) -> Tensor:
    """Multi-head attention of queries over keys and values, already split into heads.

    Parameters
    ----------
    q: (batch, heads, queries, d_key).
    k: (batch, kv_heads, keys, d_key); ``kv_heads`` divides ``heads``: query head h reads key head
        ``h // (heads // kv_heads)``.
    v: (batch, kv_heads, keys, d_value).
    mask: a `Mask` (see `manyheads.mask`), or a tensor that broadcasts to (batch, heads, queries, keys):
        boolean, True may attend; floating, added to the scores.
    causal: no query sees past its own position; the last query is aligned with the last key.
    window: only positions less than ``window`` away; costs O(length * window).
    chunk: only inside consecutive pieces of ``chunk`` positions; costs O(length * chunk).
    scale: of the scores. Default: 1 / sqrt(d_key).
    dropout: the probability with which each weight is dropped.
    kernel: ``"reference"`` is the formula with all weights in memory; ``"fused"`` goes through torch's
        scaled_dot_product_attention; ``"tiled"`` is exact a tile at a time. ``"auto"`` takes fused, or tiled
        where the fused kernels would hold all weights: dropout on the CPU, a bias with a gradient. Up to
        2^19 weights and 256 keys, dropout holds them, too.

    Returns
    -------
    (batch, heads, queries, d_value). A query that may attend to nothing gets zeros.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 8, 5, 16) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 8, 5, 16])
    >>> from manyheads.nn.mask import padding
    >>> attention(q, k, v, mask=padding(torch.tensor([5, 0])))[1].abs().max()
    tensor(0.)

    See Also
    --------
    MultiHeadAttention : the module, with projections.
    mask : masks that compose.
    statistics : what the attention does, without its weights in memory.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.
    Dao et al. 2022, FlashAttention: fast and memory-efficient exact attention with IO-awareness.
    """
    if has_torch_function((q, k, v)):
        return handle_torch_function(
            attention, (q, k, v), q, k, v, mask=mask, causal=causal, window=window, chunk=chunk, scale=scale,
            dropout=dropout, kernel=kernel,
        )  # fmt: skip
    check_shapes(q, k, v)
    conditions = check_mask(q, k, mask, causal, window, chunk)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: expected 0 <= dropout < 1, got {dropout}")
    check_kernel(kernel)
    scale = default_scale(q.shape[-1]) if scale is None else float(scale)
    offset = k.shape[2] - q.shape[2]
    run = _choose(q, k, conditions, dropout, offset) if kernel == "auto" else _RUN[kernel]
    return run(q, k, v, conditions, scale, dropout, offset)


Run = Callable[[Tensor, Tensor, Tensor, Mask, float, float, int], Tensor]
_RUN: dict[str, Run] = {"reference": reference, "fused": fused, "tiled": tiled}


def _choose(q: Tensor, k: Tensor, mask: Mask, dropout: float, offset: int) -> Run:
    if dropout > 0 and q.device.type == "cpu":
        return attend_in_memory if has_few_weights(q, k, mask, offset) else tiled
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return fused
    bias_learns = any(tensor.requires_grad for tensor in mask.tensors)
    return tiled if bias_learns or saves_masks(q, k, mask) else fused


def joined_mask(mask: Mask | Tensor | None, causal: bool, window: int | None, chunk: int | None) -> Mask:
    """One Mask from all arguments of `attention` that restrict it.

    >>> joined_mask(None, causal=True, window=2, chunk=None).dense(3, 3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    whole_mask = as_mask(mask)
    if causal:
        whole_mask = _CAUSAL if mask is None else whole_mask & _CAUSAL
    if window is not None:
        whole_mask = whole_mask & window_mask(window)
    return whole_mask if chunk is None else whole_mask & chunk_mask(chunk)


_CAUSAL = Mask(causal=True)


def default_scale(width: int) -> float:
    """1 / sqrt(d_key); scores of no width are zero, whatever the scale.

    >>> default_scale(16), default_scale(0)
    (0.25, 1.0)
    """
    return float(max(1, width) ** -0.5)


def check_kernel(kernel: str) -> None:
    """Raise unless this is the name of a kernel.

    >>> check_kernel("flash")
    Traceback (most recent call last):
    ValueError: kernel: expected one of auto, reference, fused, tiled, got 'flash'
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel: expected one of {', '.join(get_args(Kernel))}, got {kernel!r}")


def check_mask(
    q: Tensor, k: Tensor, mask: Mask | Tensor | None, causal: bool, window: int | None, chunk: int | None
) -> Mask:
    """`joined_mask`; raises unless the result fits q (batch, heads, queries, ...) and k (..., keys, ...)."""
    whole_mask = joined_mask(mask, causal, window, chunk)
    if not whole_mask.geometric:
        check(whole_mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return whole_mask


def check_shapes(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise unless q, k (and v) are (batch, heads, length, width) tensors of matching sizes."""
    for name, x in (("q", q), ("k", k), ("v", k if v is None else v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected (batch, heads, length, width), got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected the batch of q, {q.shape[0]}, got {x.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k: expected the width of q, {q.shape[3]}, got {k.shape[3]}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: its {k.shape[1]} heads do not divide the {q.shape[1]} heads of q")
    if v is not None and v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"v: expected the heads and length of k, {tuple(k.shape[1:3])}, got {tuple(v.shape[1:3])}"
        )
