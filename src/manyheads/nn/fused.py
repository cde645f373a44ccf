"""Attention through torch's scaled_dot_product_attention, kept on its fused kernels.

Fused kernels never hold the (queries, keys) weights. They are lost, on the CPU at least, when values and
keys differ in width, and they compute even what a mask hides. So: pad the narrower width with zeros, fold
chunks and windows into the batch axis, give each padded sequence its own call, and let a block of queries
see only the keys in its reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.mask import Mask, Span

# The largest mask built at once, in elements: queries are taken in blocks so that it stays below this.
MASK_ELEMENTS = 2**22
# Up to this many queries, the heads of a group become further queries of the key head they share.
FOLD_QUERIES = 16
# Below this length a call of its own for each sequence costs more than computing its padding.
UNPAD_LENGTH = 64
# From this length on, laying each head's rows side by side costs less than it saves the kernel.
CONTIGUOUS_LENGTH = 4096

# (q, k, v, mask tensor or None, causal) -> (batch, heads, queries, width)
Call = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int) -> Tensor:
    """Attention (batch, heads, queries, d_value) without the weights in memory.

    ``offset`` is the position of query 0 among the keys. With ``dropout`` it stays fused on GPUs only.
    """
    d_key, d_value = q.shape[-1], v.shape[-1]
    if d_key < d_value:
        q, k = F.pad(q, (0, d_value - d_key)), F.pad(k, (0, d_value - d_key))
    elif d_value < d_key:
        v = F.pad(v, (0, d_key - d_value))
    q, scale = _positive(q, scale)
    out = _attend(*_laid_out(q, k, v), mask, offset, partial(_sdpa, scale=scale, dropout=dropout))
    return out if d_value >= d_key else out[..., :d_value]


def saves_masks(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether the backward pass would keep mask tensors that together come near (queries, keys)."""
    if torch.compiler.is_compiling():
        return False
    queries, keys = q.shape[2], k.shape[2]
    structured = mask.window is not None or mask.chunk is not None
    if mask.slopes is not None:
        return q.shape[1] * queries * keys > MASK_ELEMENTS
    return mask.causal and queries != keys and not structured and queries * keys > MASK_ELEMENTS


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """A scale above zero: torch's causal flag hides with -inf before it scales."""
    return (q, scale) if scale > 0 else (q * scale, 1.0)


def _laid_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel needs rows without gaps, and at long lengths reads heads faster one after the other."""
    if not torch.compiler.is_compiling() and q.shape[2] >= CONTIGUOUS_LENGTH:
        return q.contiguous(), k.contiguous(), v.contiguous()
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # type: ignore[return-value]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: int, call: Call) -> Tensor:
    """Choose the structure that makes the mask cheapest, else give a mask tensor, a block at a time."""
    if mask.empty:
        return _grouped(q, k, v, None, call)
    if _plainly_causal(mask, offset):
        return call(q, k, v, None, True)
    queries, keys = q.shape[2], k.shape[2]
    if torch.compiler.is_compiling() or not (len(q) and queries and keys):  # structures depend on numbers
        return _masked(q, k, v, mask, offset, call, slice(0, queries), slice(0, keys))
    if mask.lengths is not None and mask.lengths.device.type == "cpu" and queries >= UNPAD_LENGTH:
        return _each_sequence(q, k, v, mask, offset, call)
    if mask.geometric and mask.chunk is not None and mask.chunk < keys == queries and offset == 0:
        return _each_chunk(q, k, v, mask, call)
    if mask.geometric and mask.window is not None and mask.window < keys and mask.chunk is None:
        return _banded(q, k, v, mask, offset, call)
    return _row_blocks(q, k, v, mask, offset, call, range(queries))


def _plainly_causal(mask: Mask, offset: int) -> bool:
    """Whether torch's causal flag, aligned at the first query and key, says all that the mask says."""
    return mask.causal and offset == 0 and mask.window is None and mask.chunk is None and mask.geometric


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: int, call: Call, rows: Span, columns: Span
) -> Tensor:
    """One call with a mask tensor, for queries ``rows`` and keys ``columns``: q, k and v hold just those."""
    allowed, bias = mask.rectangle(rows, columns, offset, q.device, dtype=q.dtype)
    if bias is not None:
        bias = bias.to(q.dtype)
        allowed = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    return _grouped(q, k, v, allowed, call)


def _grouped(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, call: Call) -> Tensor:
    """Few queries: the heads that share a key head become its queries, and the keys are read once for all."""
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    is_shared = allowed is None or allowed.dim() < 3 or allowed.shape[-3] == 1
    if group == 1 or queries > FOLD_QUERIES or not is_shared:
        return call(q, k, v, allowed, False)
    if allowed is not None and allowed.shape[-2] > 1:
        allowed = torch.cat((allowed,) * group, dim=-2)
    folded = q.reshape(q.shape[0], k.shape[1], group * queries, q.shape[3])
    out = call(folded, k, v, allowed, False)
    return out.reshape(*q.shape[:3], out.shape[3])


def _row_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: int, call: Call, rows: range) -> Tensor:
    """Queries ``rows`` in blocks, each with the keys in its reach, so that no mask exceeds MASK_ELEMENTS."""
    keys = k.shape[2]
    elements = keys * (q.shape[1] if mask.slopes is not None else 1)
    elements *= q.shape[0] if mask.lengths is not None or mask.queries is not None else 1
    size = max(1, MASK_ELEMENTS // elements)
    if mask.window is not None:
        size = min(size, max(64, mask.window))
    outs, start = [], rows.start
    for block in q[:, :, rows.start : rows.stop].split(size, dim=2):
        piece = range(start, start + block.shape[2])
        low, high = mask.key_range(piece, keys, offset)
        part_k, part_v = k[:, :, low:high], v[:, :, low:high]
        outs.append(_masked(block, part_k, part_v, mask, offset, call, piece, range(low, high)))
        start = piece.stop
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _each_sequence(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: int, call: Call) -> Tensor:
    """Each sequence of the batch alone, without its padding."""
    assert mask.lengths is not None
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    key_lengths = mask.lengths.clamp(0, keys).tolist()
    query_lengths = [queries] * batch if mask.queries is None else mask.queries.clamp(0, queries).tolist()
    outs = []
    # unbind and cat, not slices: their backward touches each sequence once, not the whole batch for each.
    for n, (one_q, one_k, one_v) in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), strict=True)):
        query_length, key_length = query_lengths[n], key_lengths[n]
        rest = mask.of_sequence(n, query_length, key_length)
        part_q, part_k, part_v = one_q[:, :query_length], one_k[:, :key_length], one_v[:, :key_length]
        out = _attend(part_q[None], part_k[None], part_v[None], rest, offset, call)
        outs.append(F.pad(out.transpose(1, 2), (0, 0, 0, 0, 0, queries - query_length)))
    return torch.cat(outs).transpose(1, 2)


def _each_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, call: Call) -> Tensor:
    """Chunks as batch elements; what is left over at the end is a chunk of its own."""
    assert mask.chunk is not None
    size, length = mask.chunk, q.shape[2]
    even_length = length // size * size
    inner_mask = replace(mask, chunk=None)
    # (batch, heads, length, width) -> (batch * chunks, heads, size, width)
    folded_q, folded_k, folded_v = (
        x[:, :, :even_length].transpose(1, 2).unflatten(1, (-1, size)).flatten(0, 1).transpose(1, 2)
        for x in (q, k, v)
    )
    out: Tensor = _attend(folded_q, folded_k, folded_v, inner_mask, 0, call)
    out = out.transpose(1, 2).unflatten(0, (q.shape[0], -1)).flatten(1, 2).transpose(1, 2)
    if even_length == length:
        return out
    tail = _attend(q[:, :, even_length:], k[:, :, even_length:], v[:, :, even_length:], inner_mask, 0, call)
    return torch.cat((out, tail), dim=2)


def _banded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: int, call: Call) -> Tensor:
    """A window: blocks of queries as batch elements, each with the stretch of keys in its reach.

    Inner blocks all look alike, so one small mask serves them all; those at the edges go by row blocks.
    """
    assert mask.window is not None
    queries, keys = q.shape[2], k.shape[2]
    rows = max(64, mask.window)
    reach = rows + (mask.window - 1) * (1 if mask.causal else 2)
    # Block n has queries [n * rows, ...) and keys [n * rows + shift, ...). Inner: all its keys exist.
    shift = offset - mask.window + 1
    first = max(0, -(shift // rows))
    last = min(queries // rows, (keys - reach - shift) // rows + 1)
    if last - first < 2:
        return _row_blocks(q, k, v, mask, offset, call, range(queries))
    start, stop = first * rows, last * rows
    stretch = slice(start + shift, stop - rows + shift + reach)
    inner = []
    for one_q, one_k, one_v in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        blocks = one_q[:, start:stop].unflatten(1, (-1, rows)).transpose(0, 1)  # (blocks, heads, rows, width)
        # (blocks, kv_heads, reach, width): overlapping views, no copies
        near_k, near_v = (x[:, stretch].unfold(1, reach, rows).permute(1, 0, 3, 2) for x in (one_k, one_v))
        out = _masked(blocks, near_k, near_v, mask, mask.window - 1, call, range(rows), range(reach))
        inner.append(out.transpose(1, 2).flatten(0, 1))
    parts = [torch.stack(inner).transpose(1, 2)]
    if start:
        parts.insert(0, _row_blocks(q, k, v, mask, offset, call, range(start)))
    if stop < queries:
        parts.append(_row_blocks(q, k, v, mask, offset, call, range(stop, queries)))
    return torch.cat(parts, dim=2)
