"""How much the attention of heads overlaps, query by query, with a gradient, in O(length) memory.

The overlap of two heads at a query is the cosine of their weights, sum_j p_aj p_bj / (|p_a| |p_b|): 1 for
equal rows, 0 where no key has a weight in both. With p' = p / |p| and m = sum_a p'_a, the sum over all pairs
of n heads is (|m|^2 - n) / 2, so that all pairs cost no more than one pass over the scores. Its gradient by
the scores of head a is p'_a (m - (p'_a . m) p'_a): what the softmax and the norm would add cancels. Both
passes go over tiles of scores, and the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.nn.mask import Mask
from manyheads.nn.tiled import add_bias_grad, exact, flat
from manyheads.nn.tiles import HIDDEN, Tile, exp_of_weighty, hidden, hide, mean_key, products, scratch, tiles


def overlap(q: Tensor, k: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """The mean overlap of all pairs of heads at every query, and which have one: (batch, queries) each.

    Queries that may attend to fewer than two keys, and those of fewer than two heads, have none: 0 and False.

    Parameters
    ----------
    q: (batch, heads, queries, d_key).
    k: (batch, kv_heads, keys, d_key).
    mask: biases in it may require a gradient.
    scale: of the scores.

    Examples
    --------
    >>> q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    >>> values, counted = overlap(q.expand(1, 2, 5, 4), k, Mask(causal=True), 0.5)
    >>> values.round(decimals=3), counted
    (tensor([[0., 1., 1., 1., 1.]]), tensor([[False,  True,  True,  True,  True]]))
    """
    learned = [x for x in mask.tensors if x.is_floating_point() and x.requires_grad]
    bias = sum(learned[1:], start=learned[0]) if learned else None
    if bias is not None:
        mask = replace(mask, tensors=tuple(x for x in mask.tensors if all(x is not y for y in learned)))
        bias = bias[(None,) * (4 - bias.dim())]
    return _Overlap.apply(q, k, bias, mask, scale)  # type: ignore[no-any-return]


def overlap_of_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of scores (batch, heads, queries, keys) that a model materialised, masks included.

    >>> overlap_of_scores(torch.zeros(1, 2, 1, 3))[0].round(decimals=3)
    tensor([[1.]])
    """
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    visible = scores.detach() > top - HIDDEN
    return overlap_of_weights((exact(scores) - top).masked_fill(~visible, -torch.inf).exp())


def overlap_of_weights(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of weights (batch, heads, queries, keys) from 0 on, whatever they sum to.

    >>> overlap_of_weights(torch.tensor([[[[0.5, 0.5, 0.0]], [[0.0, 1.0, 1.0]]]]))[0]
    tensor([[0.5000]])
    """
    visible = weights.detach() > 0
    live = visible.any(-1)  # (batch, heads, queries)
    filled = torch.where(live.unsqueeze(-1), weights, 1.0)  # a norm of zero has no gradient
    size = torch.linalg.vector_norm(filled, dim=-1, keepdim=True)
    direction_sum = (exact(weights) / size).sum(1)
    return _row_means(direction_sum.square().sum(-1), live, visible.sum(-1))


def _row_means(square: Tensor, live: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """From |m|^2 (batch, queries), and for (batch, heads, queries) which are there and how many keys they
    see.
    """
    heads = live.sum(1)
    is_counted = (heads > 1) & (keys.amax(1) > 1)
    pairs = (heads * (heads - 1)).clamp(min=1)
    return ((square - heads) / pairs).clamp(0.0, 1.0) * is_counted, is_counted


class _Rows(NamedTuple):
    """A tile: the scaled queries (batch, kv_heads, group, rows, d_key) and keys (batch, kv_heads, columns,
    d_key) in it, the weights of length one (batch, heads, rows, columns), which heads are there and how many
    keys they see (batch, heads, rows).
    """

    tile: Tile
    queries: Tensor
    keys: Tensor
    directions: Tensor
    live: Tensor
    key_counts: Tensor


def _tiles_of(q: Tensor, k: Tensor, mask: Mask, scale: float) -> Iterator[_Rows]:
    """All heads of some queries at a time: in `tiles`, heads that read different keys may be in others."""
    batch, heads, length, _ = q.shape
    grouped, keys = exact(q, k.shape[1]), exact(k)
    keys = keys - mean_key(keys).unsqueeze(2)
    take, offset = scratch(keys.dtype, keys.device), k.shape[2] - length
    for tile in tiles(mask, (batch, 1, heads, length), k.shape[2], offset):
        parts, count = hidden(mask, offset, heads, keys, tile)
        rows = grouped[tile.batch, :, :, tile.rows.start : tile.rows.stop] * scale
        columns = keys[tile.batch, :, tile.columns.start : tile.columns.stop]
        grouped_s = products(rows, columns, [], take)
        s = grouped_s.view(rows.shape[0], 1, heads, *grouped_s.shape[3:])
        for part, bias, _ in parts:
            if bias is not None:
                s[..., part] += bias
        hide(s, parts)
        e = take("exp", s.shape)
        _, key_counts = exp_of_weighty(s, out=e)
        if isinstance(count, Tensor):  # where all is hidden, nothing is far below the rest
            is_empty = (count == 0).expand(key_counts.shape)
            e.masked_fill_(is_empty.unsqueeze(-1), 0.0)
            key_counts = key_counts.masked_fill(is_empty, 0)
        live = key_counts > 0
        e.div_(torch.linalg.vector_norm(e, dim=-1, keepdim=True).masked_fill_(~live.unsqueeze(-1), 1.0))
        yield _Rows(tile, rows, columns, e[:, 0], live[:, 0], key_counts[:, 0])


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, bias)
        ctx.mask, ctx.scale = mask, scale
        batch, _, length, _ = q.shape
        values = torch.zeros(batch, length, dtype=exact(k).dtype, device=q.device)
        is_counted = torch.zeros(batch, length, dtype=torch.bool, device=q.device)
        for rows in _tiles_of(q, k, _add_bias(mask, bias), scale):
            index = rows.tile.batch, slice(rows.tile.rows.start, rows.tile.rows.stop)
            square = rows.directions.sum(1).square().sum(-1)
            values[index], is_counted[index] = _row_means(square, rows.live, rows.key_counts)
        ctx.mark_non_differentiable(is_counted)
        return values, is_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, bias = ctx.saved_tensors
        mask = _add_bias(ctx.mask, bias)
        grad_q, grad_k = (torch.zeros_like(x, dtype=exact(x).dtype) for x in (q, k))
        grad_q, grad_k = grad_q.contiguous(), grad_k.contiguous()
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=grad_q.dtype).contiguous()
        for rows in _tiles_of(q, k, mask, ctx.scale):
            heads, tile = rows.live.sum(1), rows.tile
            pairs = (heads * (heads - 1)).clamp(min=1)
            is_counted = (heads > 1) & (rows.key_counts.amax(1) > 1)
            flow = gradient[tile.batch, tile.rows.start : tile.rows.stop] * is_counted * 2 / pairs
            p, direction_sum = rows.directions, rows.directions.sum(1, keepdim=True)
            projection = (p * direction_sum).sum(-1, keepdim=True)
            # (batch, heads, rows, columns)
            ds = (direction_sum - projection * p).mul_(p).mul_(flow[:, None, :, None])
            if grad_bias is not None:
                add_bias_grad(grad_bias, ds.unsqueeze(1), tile, ds.shape[1])
            # (batch * kv_heads, group * rows, columns)
            grouped_ds = flat(ds.unflatten(1, rows.queries.shape[1:3]))
            tile_grad_q = (grouped_ds @ rows.keys.flatten(0, 1)).mul_(ctx.scale)
            tile_grad_q = tile_grad_q.view(rows.queries.shape).flatten(1, 2)
            grad_q[tile.batch, :, tile.rows.start : tile.rows.stop] = tile_grad_q
            tile_grad_k = grouped_ds.transpose(1, 2) @ flat(rows.queries)
            grad_k[tile.batch, :, tile.columns.start : tile.columns.stop] += tile_grad_k.view(rows.keys.shape)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_bias, None, None


def _add_bias(mask: Mask, bias: Tensor | None) -> Mask:
    return mask if bias is None else replace(mask, tensors=(*mask.tensors, bias.detach()))
