"""Exact attention a tile at a time, forward and backward, for what the fused kernels cannot do.

Dropout on the weights and the gradient of a learned bias need the weights themselves. Here they exist for
one tile only: the backward pass makes them again from the saved log-sum-exp, and draws the same dropout
again from its seed.

The two passes are torch.library operators, so that torch.compile takes each as one opaque step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads.nn.mask import Mask, part_of
from manyheads.nn.tiles import Tile, exp_of_difference, hidden, scores, scratch, tiles


def tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int) -> Tensor:
    """Attention (batch, heads, queries, d_value); a bias may need its gradient, dropout costs no memory."""
    seed = torch.randint(2**62, (1,)) if dropout > 0 else None
    added = [tensor for tensor in mask.tensors if tensor.is_floating_point()]
    bias = sum(added[1:], start=added[0]) if added else None
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    allowed = [tensor for tensor in mask.tensors if tensor.dtype == torch.bool]
    out: Tensor = _forward(
        q, k, v, bias, allowed, mask.lengths, mask.queries, mask.slopes, seed,
        mask.causal, mask.window, mask.chunk, scale, dropout, offset,
    )[0]  # fmt: skip
    return out


@torch.library.custom_op("manyheads::tiled_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Sequence[Tensor], lengths: Tensor | None,
    queries: Tensor | None, slopes: Tensor | None, seed: Tensor | None, causal: bool, window: int | None,
    chunk: int | None, scale: float, dropout: float, offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output (batch, heads, queries, d_value) and the log-sum-exp (batch, heads, queries)."""
    mask = Mask(causal, window, chunk, lengths, queries, slopes, split_tensors(bias, allowed))
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grouped, keys, values = exact(q, kv_heads), exact(k), exact(v)
    out = _zeros(q, v.shape[3], q.dtype)
    lse = torch.zeros(q.shape[:3], dtype=keys.dtype, device=q.device)
    grouped_out, grouped_lse = (x.unflatten(1, (kv_heads, group)) for x in (out, lse))
    take, drop = scratch(keys.dtype, q.device), _dropout(seed, dropout, keys.dtype, q.device)
    for tile in tiles(mask, grouped.shape[:4], keys.shape[2], offset):
        parts, count = hidden(mask, offset, group, keys, tile)
        s = scores(grouped, keys, scale, tile, parts, take)
        top = s.amax(-1, keepdim=True)
        nothing = (torch.as_tensor(count, device=q.device) == 0).unsqueeze(-1)
        p = exp_of_difference(s, top, parts, out=s)
        total = p.sum(-1, keepdim=True).masked_fill_(nothing, 1.0)
        tile.of_queries(grouped_lse).copy_((total.log() + top).squeeze(-1))
        drop(p)
        result = (flat(p) @ tile.of_keys(values).flatten(0, 1)).view(*p.shape[:-1], -1)
        tile.of_queries(grouped_out).copy_(result.div_(total))
    return out, lse


@torch.library.custom_op("manyheads::tiled_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Sequence[Tensor],
    lengths: Tensor | None, queries: Tensor | None, slopes: Tensor | None, seed: Tensor | None, out: Tensor,
    lse: Tensor, bias_grad: bool, causal: bool, window: int | None, chunk: int | None, scale: float,
    dropout: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and of the bias (empty unless ``bias_grad``)."""
    mask = Mask(causal, window, chunk, lengths, queries, slopes, split_tensors(bias, allowed))
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grouped, keys, values, flow = exact(q, kv_heads), exact(k), exact(v), exact(grad, kv_heads)
    # The softmax's backward needs sum_j p_ij dp_ij for each row, which is the output times its gradient.
    drain = (flow * exact(out, kv_heads)).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=keys.dtype) for x in (q, k, v))
    grouped_grad = grad_q.unflatten(1, (kv_heads, group))
    grad_bias = keys.new_zeros(bias.shape if bias is not None and bias_grad else 0)
    take, drop = scratch(keys.dtype, q.device), _dropout(seed, dropout, keys.dtype, q.device)
    lse = lse.unflatten(1, (kv_heads, group)).unsqueeze(-1)
    for tile in tiles(mask, grouped.shape[:4], keys.shape[2], offset):
        parts, _ = hidden(mask, offset, group, keys, tile)
        s = scores(grouped, keys, scale, tile, parts, take)
        p = exp_of_difference(s, tile.of_queries(lse), parts, out=s)
        tile_flow, tile_keys = flat(tile.of_queries(flow)), tile.of_keys(keys).flatten(0, 1)
        ds = take("ds", p.shape)
        torch.bmm(tile_flow, tile.of_keys(values).flatten(0, 1).transpose(1, 2), out=flat(ds))
        keep = drop(ds)
        ds.sub_(tile.of_queries(drain)).mul_(p)
        if keep is not None:
            p.mul_(keep)
        tile.of_keys(grad_v).flatten(0, 1).baddbmm_(flat(p).transpose(1, 2), tile_flow)
        if grad_bias.numel():
            add_bias_grad(grad_bias, ds, tile, group)
        tile.of_queries(grouped_grad).copy_((flat(ds) @ tile_keys).mul_(scale).view(*p.shape[:-1], -1))
        tile_queries = flat(tile.of_queries(grouped))
        tile.of_keys(grad_k).flatten(0, 1).baddbmm_(flat(ds).transpose(1, 2), tile_queries, alpha=scale)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias


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
    return _zeros(q, v.shape[3], q.dtype), q.new_zeros(q.shape[:3], dtype=exact(k).dtype)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    grads = (x.new_zeros(x.shape) for x in (q, k, v))
    return *grads, k.new_zeros(bias.shape if bias is not None and rest[-7] else 0, dtype=exact(k).dtype)


def _zeros(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros (batch, heads, length, width), with the heads of a token side by side: joining them is free."""
    batch, heads, length, _ = x.shape
    return torch.zeros(batch, length, heads, width, dtype=dtype, device=x.device).transpose(1, 2)


def exact(x: Tensor, kv_heads: int | None = None) -> Tensor:
    """At least float32; with ``kv_heads``, heads split into (kv_heads, group)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if kv_heads is None else x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def flat(x: Tensor) -> Tensor:
    """(batch, kv_heads, group, rows, width) -> (batch * kv_heads, group * rows, width)."""
    return x.flatten(2, 3).flatten(0, 1)


def split_tensors(bias: Tensor | None, allowed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (*allowed, *(() if bias is None else (bias,)))


def _dropout(
    seed: Tensor | None, rate: float, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor | None]:
    """A function that drops entries of a tile in place and returns its factors: 0 or 1 / (1 - rate).

    Each entry is decided by 16 random bits, four to a draw: drawing is what costs most. The kept entries are
    scaled by the exact probability of those bits, so the mean is right to the last one.
    """
    if seed is None:
        return lambda x: None
    generator = torch.Generator(device).manual_seed(int(seed))
    dropped = min(round(rate * 2**16), 2**16 - 1)
    threshold, factor = dropped - 2**15, 2**16 / (2**16 - dropped)
    take, take_draws = scratch(dtype, device), scratch(torch.int64, device)

    def drop(x: Tensor) -> Tensor:
        draws = take_draws("draws", ((x.numel() + 3) // 4,)).random_(-(2**63), None, generator=generator)
        # Clamped to two neighbours and shifted, the bits are 0 or 1: several times faster than a comparison.
        bits = draws.view(torch.int16)[: x.numel()].clamp_(threshold - 1, threshold).sub_(threshold - 1)
        keep = take("keep", x.shape).copy_(bits.view_as(x)).mul_(factor)
        x.mul_(keep)
        return keep

    return drop


def add_bias_grad(total: Tensor, ds: Tensor, tile: Tile, group: int) -> None:
    """Add the tile's score gradients to the bias's, summed over the axes where the bias broadcasts."""
    heads = slice(tile.kv_heads.start * group, tile.kv_heads.stop * group)
    ds = ds.flatten(1, 2)
    broadcast = [n for n, size in enumerate(total.shape) if size == 1]
    part = part_of(total, tile.rows, tile.columns, tile.batch, heads)
    part.add_(ds.sum(broadcast, keepdim=True) if broadcast else ds)
