"""Attention scores a tile at a time: the loop that the tiled kernel and the statistics share.

A tile is some sequences, some key heads with the query heads they serve, a block of queries, and every key
in the reach of those queries. Its rows are whole, so a softmax over it is exact at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.nn.mask import Mask

# Scores held at once. Smaller tiles stay nearer to the processor, larger ones start its threads less often:
# 2^21 (8 MB in float32) is where statistics and dropout were fastest.
TILE_ELEMENTS = 2**21
# Fewer rows than this make the matrix products slow; more make causal tiles compute what they hide.
TILE_ROWS = 128


class Tile(NamedTuple):
    """One tile: slices into (batch, kv_heads, group, queries, ...) and (batch, kv_heads, keys, ...)."""

    batch: slice
    kv_heads: slice
    rows: range
    columns: range

    def of_queries(self, x: Tensor) -> Tensor:
        """The part of x (batch, kv_heads, group, queries, ...) that belongs to the tile."""
        return x[self.batch, self.kv_heads, :, self.rows.start : self.rows.stop]

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of x (batch, kv_heads, keys, ...) that belongs to the tile."""
        return x[self.batch, self.kv_heads, self.columns.start : self.columns.stop]


def tiles(mask: Mask, queries_shape: Sequence[int], keys: int, offset: int) -> Iterator[Tile]:
    """Cut attention into tiles of about TILE_ELEMENTS scores, leaving out what no query of a tile can reach.

    ``queries_shape`` is (batch, kv_heads, group, queries). Queries that can reach nothing are in no tile.

    >>> [tile.columns for tile in tiles(Mask(causal=True), (1, 1, 1, 256), 256, 0)]
    [range(0, 128), range(0, 256)]
    """
    batch, kv_heads, group, queries = queries_shape
    lengths = None
    if mask.lengths is not None and mask.lengths.device.type == "cpu":
        lengths = mask.lengths.clamp(0, keys).tolist()
    widest = min(keys, 2 * mask.window + TILE_ROWS) if mask.window is not None else keys
    widest = max(1, widest if mask.chunk is None else min(widest, 2 * mask.chunk + TILE_ROWS))
    rows = max(1, min(queries, TILE_ROWS, TILE_ELEMENTS // (group * widest)))
    heads = max(1, min(kv_heads, TILE_ELEMENTS // (group * rows * widest)))
    sequences = 1
    if rows == queries and heads == kv_heads:
        sequences = max(1, min(batch, TILE_ELEMENTS // (group * rows * widest * heads)))
    for first in range(0, batch, sequences):
        members = slice(first, min(batch, first + sequences))
        longest = keys if lengths is None else max(lengths[members])
        for start in range(0, queries, rows):
            block = range(start, min(queries, start + rows))
            low, high = mask.key_range(block, keys, offset)
            columns = range(min(low, longest), min(high, longest))
            for head in range(0, kv_heads if columns else 0, heads):
                yield Tile(members, slice(head, min(kv_heads, head + heads)), block, columns)


class Hidden(NamedTuple):
    """What a mask does to some columns of a tile; tensors broadcast to the tile's scores."""

    columns: slice  # counted from the tile's first
    bias: Tensor | None  # added
    keep: Tensor | None  # 1 where a query may attend, else 0


def hidden(
    mask: Mask, offset: int, group: int, like: Tensor, tile: Tile, hiding: float = -torch.inf
) -> tuple[list[Hidden], Tensor | int]:
    """The columns of a tile that a mask hides or adds to, and how many keys each query may attend to.

    A bias at or below ``hiding`` hides its key. ``like`` gives dtype and device.

    >>> tile = Tile(slice(0, 1), slice(0, 1), range(128, 256), range(0, 256))
    >>> parts, count = hidden(Mask(causal=True), 0, 1, torch.empty(0), tile)
    >>> [part.columns for part in parts], count.shape
    ([slice(129, 256, None)], torch.Size([128]))
    """
    start, stop = tile.columns.start, tile.columns.stop
    edges = [range(start, stop)]
    if mask.geometric:  # only the columns that some of the queries see and others do not
        low, high = mask.open_range(tile.rows, stop, offset)
        edges = [range(start, max(low, start)), range(max(high, start), stop)] if low < high else edges
    heads = slice(tile.kv_heads.start * group, tile.kv_heads.stop * group)
    parts: list[Hidden] = []
    count: Tensor | int = len(tile.columns)
    for columns in edges:
        if not columns:
            continue
        pair = mask.rectangle(tile.rows, columns, offset, like.device, tile.batch, heads)
        allowed, bias = (None if x is None else _by_group(x, group) for x in pair)
        if bias is not None:
            shown = bias > hiding
            allowed = shown if allowed is None else allowed & shown
            bias = bias.masked_fill(~shown, 0.0)  # hidden by `keep`: -inf would make NaN of a whole row
        if allowed is not None:
            place = slice(columns.start - start, columns.stop - start)
            parts.append(Hidden(place, bias, allowed.to(like.dtype)))
            count = count - (~allowed).sum(-1) * (len(columns) if allowed.shape[-1] == 1 else 1)
    return parts, count


def scores(q: Tensor, k: Tensor, scale: float, tile: Tile, parts: list[Hidden], take: Scratch) -> Tensor:
    """The tile's scores (batch, kv_heads, group, rows, columns), far below all others where hidden.

    q is (batch, kv_heads, group, queries, d_key), k is (batch, kv_heads, keys, d_key).
    """
    part_q, part_k = tile.of_queries(q) * scale, tile.of_keys(k)
    shape = (*part_q.shape[:-1], part_k.shape[2])
    s = take("scores", shape)
    flat = s.view(shape[0] * shape[1], -1, shape[-1])
    torch.bmm(part_q.flatten(2, 3).flatten(0, 1), part_k.flatten(0, 1).transpose(1, 2), out=flat)
    for columns, bias, keep in parts:
        if bias is not None:
            s[..., columns] += bias
        if keep is not None:
            s[..., columns] += (keep - 1) * 1e30  # adding is several times faster than filling by a mask
    return s


def centred(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Keys (batch, kv_heads, keys, d_key) without their mean, and what each query's scores lose by that."""
    centre = k.mean(2, keepdim=True) if k.shape[2] else k.new_zeros(*k.shape[:2], 1, k.shape[3])
    return k - centre, scale * (q @ centre.unsqueeze(2).transpose(-2, -1)).squeeze(-1)


def exp_of_difference(s: Tensor, shift: Tensor, parts: list[Hidden], out: Tensor) -> Tensor:
    """exp(s - shift), exactly zero where hidden; s itself becomes s - shift.

    Hidden scores are raised first: numbers that vanish send the processor's exp down a slow path.
    """
    s.sub_(shift)
    for columns, _, keep in parts:
        if keep is not None:
            s[..., columns].clamp_(min=0.5 * math.log(torch.finfo(s.dtype).tiny))
    torch.exp(s, out=out)
    for columns, _, keep in parts:
        if keep is not None:
            out[..., columns] *= keep
    return out


Scratch = Callable[[str, Sequence[int]], Tensor]


def scratch(dtype: torch.dtype, device: torch.device) -> Scratch:
    """Memory to borrow by name, again and again: fresh pages for every tile cost more than the arithmetic.

    >>> take = scratch(torch.float32, torch.device("cpu"))
    >>> take("scores", (2, 3)).data_ptr() == take("scores", (3, 2)).data_ptr()
    True
    """
    held: dict[str, Tensor] = {}

    def take(name: str, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        if name not in held or held[name].numel() < size:
            # The whole at once: growing tile by tile would leave holes, and untouched memory costs nothing.
            held[name] = torch.empty(max(size, TILE_ELEMENTS), dtype=dtype, device=device)
        return held[name][:size].view(*shape)

    return take


def _by_group(x: Tensor, group: int) -> Tensor:
    """From axes that broadcast to (..., heads, rows, columns) to (..., kv_heads, group, rows, columns)."""
    if x.dim() < 3:
        return x
    return x.unflatten(-3, (-1, group)) if x.shape[-3] > 1 else x.unsqueeze(-3)
