"""Attention scores a tile at a time: the loop that the tiled kernel and the statistics share.

A tile is some sequences, some key heads with the query heads they serve, a block of queries, and every key
in the reach of those queries. Its rows are whole, so a softmax over it is exact at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.nn.mask import Mask

# Scores held at once. 2^20 float32 are 4 MB: they stay in the cache while several passes read them.
TILE_ELEMENTS = 2**20
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


def tiles(
    mask: Mask, batch: int, kv_heads: int, group: int, queries: int, keys: int, offset: int
) -> Iterator[Tile]:
    """Cut attention into tiles of about TILE_ELEMENTS scores, leaving out what no query of a tile can reach.

    Queries that can reach nothing are in no tile.

    >>> [tile.columns for tile in tiles(Mask(causal=True), 1, 1, 1, 256, 256, 0)]
    [range(0, 128), range(0, 256)]
    """
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


def rectangle(
    mask: Mask, offset: int, group: int, device: torch.device, tile: Tile
) -> tuple[Tensor | None, Tensor | None]:
    """The tile's part of a mask, (allowed, bias): each broadcasts to (batch, kv_heads, group, rows, columns)."""
    heads = slice(tile.kv_heads.start * group, tile.kv_heads.stop * group)
    parts = mask.rectangle(tile.rows, tile.columns, offset, device, tile.batch, heads)
    allowed, bias = (None if x is None else _by_group(x, group) for x in parts)
    return allowed, bias


def scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    tile: Tile,
    allowed: Tensor | None,
    bias: Tensor | None,
    hidden: float = -torch.inf,
) -> Tensor:
    """The tile's scores (batch, kv_heads, group, rows, columns), ``hidden`` where not allowed.

    q is (batch, kv_heads, group, queries, d_key), k is (batch, kv_heads, keys, d_key).
    """
    part_q, part_k = tile.of_queries(q) * scale, tile.of_keys(k)
    s = torch.bmm(part_q.flatten(2, 3).flatten(0, 1), part_k.flatten(0, 1).transpose(1, 2))
    s = s.view(*part_q.shape[:-1], part_k.shape[2])
    if bias is not None:
        s += bias
    if allowed is not None:
        s.masked_fill_(~allowed, hidden)
    return s


def _by_group(x: Tensor, group: int) -> Tensor:
    """From axes that broadcast to (..., heads, rows, columns) to (..., kv_heads, group, rows, columns)."""
    if x.dim() < 3:
        return x
    return x.unflatten(-3, (-1, group)) if x.shape[-3] > 1 else x.unsqueeze(-3)


def softmax_(s: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores into exp(s - lse) in place; return them with lse (..., rows).

    Rows with nothing to attend to become zero, and their lse is +inf, so that exp(s - lse) is zero too.
    """
    top = s.amax(-1, keepdim=True)
    nothing = top == -torch.inf
    top = top.masked_fill(nothing, 0.0)
    total = s.sub_(top).exp_().sum(-1, keepdim=True)
    s /= total.masked_fill(nothing, 1.0)
    lse = (total.log() + top).masked_fill(nothing, torch.inf)
    return s, lse.squeeze(-1)
