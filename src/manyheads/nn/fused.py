"""Attention through torch's scaled_dot_product_attention, kept on its fused kernels.

Fused kernels never hold the (queries, keys) weights. They are lost, on the CPU at least, when values and
keys differ in width, and they compute even what a mask hides. So: pad the narrower width with zeros, fold
chunks and windows into the batch axis, give each padded sequence its own call, and let a block of queries
see only the keys in its reach.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.mask import Mask

# The largest mask built at once, in elements: queries are taken in blocks so that it stays below this.
MASK_ELEMENTS = 2**22
# Up to this many queries, the heads of a group become further queries of the key head they share.
FOLD_QUERIES = 16
# Below this length a call of its own for each sequence costs more than computing its padding.
UNPAD_LENGTH = 64


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int) -> Tensor:
    """Attention (batch, heads, queries, d_value) without the weights in memory.

    ``offset`` is the position of query 0 among the keys. With ``dropout`` the kernel stays fused on GPUs
    only.
    """
    d_key, d_value = q.shape[-1], v.shape[-1]
    if d_key < d_value:
        q, k = F.pad(q, (0, d_value - d_key)), F.pad(k, (0, d_value - d_key))
    elif d_value < d_key:
        v = F.pad(v, (0, d_key - d_value))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = _attend(q, k, v, mask, scale, dropout, offset)
    return out if d_key <= d_value else out[..., :d_value]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int) -> Tensor:
    """Choose the structure that makes the mask cheapest, else give a mask tensor, a block at a time."""
    queries, keys = q.shape[2], k.shape[2]
    if queries and keys and not torch.compiler.is_compiling():  # the structures below depend on the numbers
        if mask.lengths is not None and mask.lengths.device.type == "cpu" and queries >= UNPAD_LENGTH:
            return _each_sequence(q, k, v, mask, scale, dropout, offset)
        if mask.geometric and mask.chunk is not None and mask.chunk < keys == queries and offset == 0:
            return _each_chunk(q, k, v, mask, scale, dropout)
        if mask.geometric and mask.window is not None and mask.window < keys and mask.chunk is None:
            return _banded(q, k, v, mask, scale, dropout, offset)
        if not mask.empty and not _plainly_causal(mask, offset):
            return _row_blocks(q, k, v, mask, scale, dropout, offset, range(queries))
    return _call(q, k, v, mask, scale, dropout, offset, range(queries), range(keys))


def _plainly_causal(mask: Mask, offset: int) -> bool:
    """Whether torch's causal flag, aligned at the first query and key, says all that the mask says."""
    return mask.causal and offset == 0 and mask.without("causal").empty


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    offset: int,
    rows: range,
    columns: range,
) -> Tensor:
    """One fused call for queries ``rows`` and keys ``columns``, of which q, k and v hold just those."""
    causal = _plainly_causal(mask, offset + rows.start - columns.start)
    allowed = bias = None
    if not causal and not mask.empty:
        allowed, bias = mask.rectangle(rows, columns, offset, q.device)
    if bias is not None:
        bias = bias.to(q.dtype)
        allowed = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    heads, kv_heads, queries = q.shape[1], k.shape[1], q.shape[2]
    group = heads // kv_heads
    one_for_all_heads = allowed is None or allowed.dim() < 3 or allowed.shape[-3] == 1
    if group == 1 or queries > FOLD_QUERIES or causal or not one_for_all_heads:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=group > 1
        )
    if allowed is not None and allowed.shape[-2] > 1:
        allowed = torch.cat((allowed,) * group, dim=-2)
    q = q.reshape(q.shape[0], kv_heads, group * queries, q.shape[3])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
    return out.reshape(q.shape[0], heads, queries, v.shape[3])


def _row_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int, rows: range
) -> Tensor:
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
        part = k[:, :, low:high], v[:, :, low:high]
        outs.append(_call(block, *part, mask, scale, dropout, offset, piece, range(low, high)))
        start = piece.stop
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _each_sequence(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int
) -> Tensor:
    """Each sequence of the batch alone, without its padding."""
    assert mask.lengths is not None
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    key_lengths = mask.lengths.clamp(0, keys).tolist()
    query_lengths = [queries] * batch if mask.queries is None else mask.queries.clamp(0, queries).tolist()
    outs = []
    # unbind and cat, not slices: their backward touches each sequence once, not the whole batch for each.
    for n, (one_q, one_k, one_v) in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), strict=True)):
        real, seen = query_lengths[n], key_lengths[n]
        rest = mask.of_sequence(n, real, seen)
        out = _attend(
            one_q[None, :, :real], one_k[None, :, :seen], one_v[None, :, :seen], rest, scale, dropout, offset
        )
        outs.append(F.pad(out.transpose(1, 2), (0, 0, 0, 0, 0, queries - real)))
    return torch.cat(outs).transpose(1, 2)


def _each_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float) -> Tensor:
    """Chunks as batch elements; what is left over at the end is a chunk of its own."""
    assert mask.chunk is not None
    size, length = mask.chunk, q.shape[2]
    whole = length // size * size
    inside = mask.without("chunk")

    def fold(x: Tensor) -> Tensor:  # (batch, heads, length, width) -> (batch * chunks, heads, size, width)
        return x[:, :, :whole].transpose(1, 2).unflatten(1, (-1, size)).flatten(0, 1).transpose(1, 2)

    out = _attend(fold(q), fold(k), fold(v), inside, scale, dropout, 0)
    out = out.transpose(1, 2).unflatten(0, (q.shape[0], -1)).flatten(1, 2).transpose(1, 2)
    if whole == length:
        return out
    tail = _attend(q[:, :, whole:], k[:, :, whole:], v[:, :, whole:], inside, scale, dropout, 0)
    return torch.cat((out, tail), dim=2)


def _banded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, offset: int) -> Tensor:
    """A window: blocks of queries as batch elements, each with the stretch of keys in its reach.

    Inner blocks all look alike, so one small mask serves them all; those at the edges go by row blocks.
    """
    assert mask.window is not None
    queries, keys = q.shape[2], k.shape[2]
    rows = max(64, mask.window)
    reach = rows + (mask.window - 1) * (1 if mask.causal else 2)
    # Block n has queries [n * rows, ...) and keys [n * rows + shift, ...): those that lie inside the keys
    # are inner.
    shift = offset - mask.window + 1
    first = max(0, -(shift // rows))
    last = min(queries // rows, (keys - reach - shift) // rows + 1)
    if last - first < 2:
        return _row_blocks(q, k, v, mask, scale, dropout, offset, range(queries))
    start, stop = first * rows, last * rows
    stretch = slice(start + shift, stop - rows + shift + reach)
    inner = []
    for one_q, one_k, one_v in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        blocks = one_q[:, start:stop].unflatten(1, (-1, rows)).transpose(0, 1)  # (blocks, heads, rows, width)
        # (blocks, kv_heads, reach, width): overlapping views, no copies
        stretches = (x[:, stretch].unfold(1, reach, rows).permute(1, 0, 3, 2) for x in (one_k, one_v))
        out = _call(blocks, *stretches, mask, scale, dropout, mask.window - 1, range(rows), range(reach))
        inner.append(out.transpose(1, 2).flatten(0, 1))
    parts = [torch.stack(inner).transpose(1, 2)]
    if start:
        parts.insert(0, _row_blocks(q, k, v, mask, scale, dropout, offset, range(start)))
    if stop < queries:
        parts.append(_row_blocks(q, k, v, mask, scale, dropout, offset, range(stop, queries)))
    return torch.cat(parts, dim=2)
