"""Exact attention a tile at a time, forward and backward, for what the fused kernels cannot do.

Dropout on the weights and the gradient of a learned bias need the weights themselves. Here they exist for
one tile
only: the backward pass makes them again from the saved log-sum-exp, and draws the same dropout again from
its seed.

The two passes are torch.library operators, so that torch.compile takes each as one opaque step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads.nn.mask import Mask
from manyheads.nn.tiles import Tile, rectangle, scores, softmax_, tiles


def tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int) -> Tensor:
    """Attention (batch, heads, queries, d_value); a bias may need its gradient, dropout costs no memory."""
    seed = torch.randint(2**62, (1,)) if dropout > 0 else None
    added = [tensor for tensor in mask.tensors if tensor.is_floating_point()]
    bias = sum(added[1:], start=added[0]) if added else None
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    allowed = [tensor for tensor in mask.tensors if tensor.dtype == torch.bool]
    out, _ = _forward(
        q, k, v, bias, allowed, mask.lengths, mask.queries, mask.slopes, seed,
        mask.causal, mask.window, mask.chunk, scale, dropout, offset,
    )  # fmt: skip
    return out


@torch.library.custom_op("manyheads::tiled_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Sequence[Tensor], lengths: Tensor | None,
    queries: Tensor | None, slopes: Tensor | None, seed: Tensor | None, causal: bool, window: int | None,
    chunk: int | None, scale: float, dropout: float, offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (batch, heads, queries, d_value) and the log-sum-exp (batch, heads, queries)."""
    mask = Mask(causal, window, chunk, lengths, queries, slopes, _tensors(bias, allowed))
    kv_heads = k.shape[1]
    grouped, keys, values = _exact(q, kv_heads), _exact(k), _exact(v)
    out, lse = _outputs(q, k, v)
    drop = _dropout(seed, dropout, q.device)
    for tile in tiles(mask, *grouped.shape[:4], keys.shape[2], offset):
        hidden = rectangle(mask, offset, grouped.shape[2], q.device, tile)
        p, tile_lse = softmax_(scores(grouped, keys, scale, tile, *hidden))
        tile.of_queries(lse.unflatten(1, (kv_heads, -1))).copy_(tile_lse)
        drop(p)
        result = _flat(p) @ tile.of_keys(values).flatten(0, 1)
        tile.of_queries(out.unflatten(1, (kv_heads, -1))).copy_(result.view(*p.shape[:-1], -1))
    return out, lse


@torch.library.custom_op("manyheads::tiled_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Sequence[Tensor],
    lengths: Tensor | None, queries: Tensor | None, slopes: Tensor | None, seed: Tensor | None, out: Tensor,
    lse: Tensor, bias_grad: bool, causal: bool, window: int | None, chunk: int | None, scale: float,
    dropout: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and of the bias (empty unless ``bias_grad``)."""
    mask = Mask(causal, window, chunk, lengths, queries, slopes, _tensors(bias, allowed))
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grouped, keys, values, flow = _exact(q, kv_heads), _exact(k), _exact(v), _exact(grad, kv_heads)
    # The softmax's backward needs sum_j p_ij dp_ij for each row, which is the output times its gradient.
    drain = (flow * _exact(out, kv_heads)).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(grouped), torch.zeros_like(keys), torch.zeros_like(values)
    grad_bias = (
        torch.zeros_like(bias, dtype=keys.dtype) if bias_grad and bias is not None else keys.new_zeros(0)
    )
    drop = _dropout(seed, dropout, q.device)
    lse = lse.unflatten(1, (kv_heads, group)).unsqueeze(-1)
    for tile in tiles(mask, *grouped.shape[:4], keys.shape[2], offset):
        hidden = rectangle(mask, offset, group, q.device, tile)
        p = scores(grouped, keys, scale, tile, *hidden).sub_(tile.of_queries(lse)).exp_()
        tile_flow = _flat(tile.of_queries(flow))
        tile_keys, tile_values = tile.of_keys(keys).flatten(0, 1), tile.of_keys(values).flatten(0, 1)
        ds = (tile_flow @ tile_values.transpose(1, 2)).view_as(p)
        keep = drop(ds)
        ds.sub_(tile.of_queries(drain)).mul_(p)
        if keep is not None:
            p.mul_(keep)
        shape = tile.of_keys(keys).shape[:3]
        tile.of_keys(grad_v).add_((_flat(p).transpose(1, 2) @ tile_flow).view(*shape, -1))
        if grad_bias.numel():
            _add_bias_grad(grad_bias, ds, tile, group)
        ds.mul_(scale)
        tile.of_queries(grad_q).copy_((_flat(ds) @ tile_keys).view(*p.shape[:-1], -1))
        tile.of_keys(grad_k).add_(
            (_flat(ds).transpose(1, 2) @ _flat(tile.of_queries(grouped))).view(*shape, -1)
        )
    return grad_q.flatten(1, 2).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, allowed, lengths, queries, slopes, seed, *ctx.numbers = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, bias, lengths, queries, slopes, seed, *output, *allowed)


def _grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, lengths, queries, slopes, seed, out, lse, *allowed = ctx.saved_tensors
    need_bias = ctx.needs_input_grad[3]
    *grads, grad_bias = _backward(
        grad, q, k, v, bias, allowed, lengths, queries, slopes, seed, out, lse, need_bias, *ctx.numbers
    )
    return *grads, grad_bias.to(bias.dtype) if need_bias else None, [None] * len(allowed), *[None] * 10


_forward.register_autograd(_grads, setup_context=_setup)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, k, v)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    bias_grad = bias is not None and rest[-7]
    exact = torch.promote_types(k.dtype, torch.float32)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, torch.empty_like(bias, dtype=exact) if bias_grad else k.new_empty(0, dtype=exact)


def _outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros for the output, laid out so that joining the heads is free, and for the log-sum-exp."""
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, torch.zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def _exact(x: Tensor, kv_heads: int | None = None) -> Tensor:
    """At least float32; with ``kv_heads``, heads split into (kv_heads, group)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if kv_heads is None else x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _flat(x: Tensor) -> Tensor:
    """(batch, kv_heads, group, rows, width) -> (batch * kv_heads, group * rows, width)."""
    return x.flatten(2, 3).flatten(0, 1)


def _tensors(bias: Tensor | None, allowed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (*allowed, *(() if bias is None else (bias,)))


def _dropout(seed: Tensor | None, rate: float, device: torch.device) -> Callable[[Tensor], Tensor | None]:
    """A function that drops entries of a tile in place and returns its factors: 0 or 1 / (1 - rate).

    Each entry is decided by 16 random bits, four to a draw: drawing is what costs most. The kept entries are
    scaled by the exact probability of those bits, so the mean is right to the last one.
    """
    if seed is None:
        return lambda x: None
    generator = torch.Generator(device).manual_seed(int(seed))
    dropped = min(round(rate * 2**16), 2**16 - 1)
    threshold, scale = dropped - 2**15, 2**16 / (2**16 - dropped)

    def drop(x: Tensor) -> Tensor:
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=device)
        bits = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[: x.numel()]
        # Clamped to two neighbours and shifted, the bits are 0 or 1: several times faster than a comparison.
        keep = bits.clamp_(threshold - 1, threshold).sub_(threshold - 1).to(x.dtype).mul_(scale).view_as(x)
        x.mul_(keep)
        return keep

    return drop


def _add_bias_grad(total: Tensor, ds: Tensor, tile: Tile, group: int) -> None:
    """Add the tile's score gradients to the bias's, summed over the axes where the bias broadcasts."""
    heads = slice(tile.kv_heads.start * group, tile.kv_heads.stop * group)
    ds = ds.flatten(1, 2)
    slices = (
        tile.batch,
        heads,
        slice(tile.rows.start, tile.rows.stop),
        slice(tile.columns.start, tile.columns.stop),
    )
    place = tuple(slice(None) if size == 1 else s for size, s in zip(total.shape, slices, strict=True))
    part = total[place]
    part.add_(ds.sum([n for n, size in enumerate(total.shape) if size == 1], keepdim=True))
