"""Attention scores a tile at a time: the loop that the tiled kernel and the statistics share.

A tile is some sequences, some key heads with the query heads they serve, a block of queries, and every key
in the reach of those queries. Its rows are whole, so a softmax over it is exact at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.nn.mask import Mask

# Scores held at once. Smaller tiles stay nearer to the processor, larger ones start its threads less often:
# 2^21 (8 MB in float32) is where dropout was fastest.
TILE_ELEMENTS = 2**21
# Fewer rows than this make the matrix products slow; more make causal tiles compute what they hide.
TILE_ROWS = 128
# A score or bias this far below the largest of its query is that of a mask: models write -1e4, -1e9, the
# lowest number of the dtype, or -inf. What is nearer has a weight, however small.
HIDDEN = 1e3
# Number of keys from which their mean is estimated.
FEW = 64


class Tile(NamedTuple):
    """One tile: slices into (batch, kv_heads, group, queries, ...) and (batch, kv_heads, keys, ...)."""

    batch: slice
    kv_heads: slice
    rows: range
    columns: range

    def of_queries(self, x: Tensor, lead: int = 0) -> Tensor:
        """The tile's part of x (..., batch, kv_heads, group, queries, ...), after ``lead`` other axes."""
        part = self.batch, self.kv_heads, slice(None), slice(self.rows.start, self.rows.stop)
        return x[(slice(None),) * lead + part]

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of x (batch, kv_heads, keys, ...) that belongs to the tile."""
        return x[self.batch, self.kv_heads, self.columns.start : self.columns.stop]


def tiles(
    mask: Mask, queries_shape: Sequence[int], keys: int, offset: int, elements: int | None = None
) -> Iterator[Tile]:
    """Cut attention into tiles of about ``elements`` scores (TILE_ELEMENTS by default), leaving out keys
    that no query of a tile can reach.

    ``queries_shape`` is (batch, kv_heads, group, queries). Queries that can reach nothing are in no tile.

    >>> [tile.columns for tile in tiles(Mask(causal=True), (1, 1, 1, 256), 256, 0)]
    [range(0, 128), range(0, 256)]
    """
    batch, kv_heads, group, queries = queries_shape
    fewest = 1 if elements is None else 64 // group  # small tiles of few, long rows make poor matrix products
    elements = TILE_ELEMENTS if elements is None else elements
    lengths, query_lengths = [keys] * batch, [queries] * batch
    if mask.lengths is not None and mask.lengths.device.type == "cpu":
        lengths = mask.lengths.clamp(0, keys).tolist()
    if mask.queries is not None and mask.queries.device.type == "cpu":
        query_lengths = mask.queries.clamp(0, queries).tolist()
    widest = min(keys, 2 * mask.window + TILE_ROWS) if mask.window is not None else keys
    widest = max(1, widest if mask.chunk is None else min(widest, 2 * mask.chunk + TILE_ROWS))
    rows = max(1, min(queries, TILE_ROWS, max(fewest, elements // (group * widest))))
    heads = max(1, min(kv_heads, elements // (group * rows * widest)))
    sequences = 1
    if rows == queries and heads == kv_heads:
        sequences = max(1, min(batch, elements // (group * rows * widest * heads)))
    for first in range(0, batch, sequences):
        members = slice(first, min(batch, first + sequences))
        longest, last = max(lengths[members]), max(query_lengths[members])
        for start in range(0, last, rows):
            block = range(start, min(last, start + rows))
            low, high = mask.key_range(block, keys, offset)
            columns = range(min(low, longest), min(high, longest))
            if not columns:
                continue
            size = len(lengths[members]) * group * len(block) * len(columns)
            # early blocks of causal attention are narrow
            heads_at_once = max(heads, min(kv_heads, elements // size))
            for head in range(0, kv_heads, heads_at_once):
                yield Tile(members, slice(head, min(kv_heads, head + heads_at_once)), block, columns)


class Hidden(NamedTuple):
    """What a mask does to some columns of a tile; tensors broadcast to the tile's scores."""

    columns: slice  # counted from the tile's first
    bias: Tensor | None  # added
    keep: Tensor | None  # 1 where a query may attend, else 0


def hidden(
    mask: Mask, offset: int, group: int, like: Tensor, tile: Tile
) -> tuple[list[Hidden], Tensor | int]:
    """The columns of a tile that a mask hides or adds to, and how many keys each query may attend to.

    A bias of -inf hides its key. ``like`` gives dtype and device.

    >>> tile = Tile(slice(0, 1), slice(0, 1), range(128, 256), range(0, 256))
    >>> parts, count = hidden(Mask(causal=True), 0, 1, torch.empty(0), tile)
    >>> [part.columns for part in parts], count.shape
    ([slice(129, 256, None)], torch.Size([128]))
    """
    start, stop = tile.columns.start, tile.columns.stop
    edges = [range(start, stop)]
    if mask.slopes is None and not mask.tensors and mask.queries is None:
        # Only the columns that some of the queries see and others do not.
        low, high = mask.open_range(tile.rows, stop, offset)
        if mask.lengths is not None:
            readable = mask.lengths.device.type == "cpu"  # reading numbers would make a GPU wait
            high = min(high, int(mask.lengths[tile.batch].min())) if readable else start
        edges = [range(start, max(low, start)), range(max(high, start), stop)] if low < high else edges
    heads = slice(tile.kv_heads.start * group, tile.kv_heads.stop * group)
    parts: list[Hidden] = []
    count: Tensor | int = len(tile.columns)
    for columns in edges:
        if not columns:
            continue
        pair = mask.rectangle(tile.rows, columns, offset, like.device, tile.batch, heads, like.dtype)
        allowed, bias = (None if x is None else _by_group(x, group) for x in pair)
        if bias is not None:
            visible = bias > -torch.inf
            allowed = visible if allowed is None else allowed & visible
            bias = bias.masked_fill(~visible, 0.0)  # hidden by `keep`: -inf would make NaN of a whole row
        if allowed is not None:
            position = slice(columns.start - start, columns.stop - start)
            parts.append(Hidden(position, bias, allowed.to(like.dtype)))
            count = count - (~allowed).sum(-1) * (len(columns) if allowed.shape[-1] == 1 else 1)
    return parts, count


def scores(q: Tensor, k: Tensor, scale: float, tile: Tile, parts: list[Hidden], take: Scratch) -> Tensor:
    """The tile's scores (batch, kv_heads, group, rows, columns), far below all others where hidden.

    q is (batch, kv_heads, group, queries, d_key), k is (batch, kv_heads, keys, d_key).
    """
    s = products(tile.of_queries(q) * scale, tile.of_keys(k), parts, take)
    hide(s, parts)
    return s


def products(q: Tensor, k: Tensor, parts: list[Hidden], take: Scratch) -> Tensor:
    """Scores (batch, kv_heads, group, rows, columns) of a tile's queries, already scaled, and its keys, with
    what is added to them but nothing hidden.
    """
    shape = (*q.shape[:-1], k.shape[2])
    s = take("scores", shape)
    flat = s.view(shape[0] * shape[1], -1, shape[-1])
    torch.bmm(q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out=flat)
    for columns, bias, _ in parts:
        if bias is not None:
            s[..., columns] += bias
    return s


def hide(s: Tensor, parts: list[Hidden]) -> None:
    """Put the scores that are hidden far below all others."""
    for columns, _, keep in parts:
        if keep is not None:
            s[..., columns] += (keep - 1) * 1e30  # adding is several times faster than filling by a mask


def centred(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Keys (batch, kv_heads, keys, d_key) without their mean, and what each query's scores lose by that."""
    mean = mean_key(k)
    return k - mean.unsqueeze(2), scale * (q @ mean[:, :, None, :, None]).squeeze(-1)


def mean_key(k: Tensor) -> Tensor:
    """About the mean (batch, kv_heads, d_key) of the keys (batch, kv_heads, keys, d_key).

    Any vector may be subtracted from all keys; one near their mean leaves small numbers. A few keys suffice.
    """
    sample = k[:, :, :: max(1, k.shape[2] // FEW)]
    return sample.mean(2) if k.shape[2] else k.new_zeros(*k.shape[:2], k.shape[3])


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


def exp_of_weighty(s: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """exp(s - top) with the largest score of each row as top, and exactly zero at `HIDDEN` below it, where a
    mask has its scores: exp has no number for them in any dtype.

    s itself becomes s - top, with no -inf left. Returns top (..., 1), 0 in rows of -inf, and how many scores
    of each row (...) have a weight.

    >>> s = torch.tensor([[-6000.0, -6001.0, -7200.0], [-torch.inf, -torch.inf, -torch.inf]])
    >>> exp_of_weighty(s, out=torch.empty(2, 3))
    (tensor([[-6000.],
            [    0.]]), tensor([2, 0]))
    """
    finfo = torch.finfo(s.dtype)
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    s.sub_(top)
    visible = s > -HIDDEN
    torch.exp(s.clamp_(min=0.5 * math.log(finfo.tiny)), out=out)
    out *= visible
    return top, visible.sum(-1)


Scratch = Callable[[str, Sequence[int]], Tensor]
_thread_memory = threading.local()


def scratch(dtype: torch.dtype, device: torch.device) -> Scratch:
    """Memory to borrow by name, again and again: fresh pages for every tile cost more than the arithmetic.

    On the CPU each thread keeps what its tiles touched (a few megabytes): fresh pages cost at every call.

    >>> take = scratch(torch.float32, torch.device("cpu"))
    >>> take("scores", (2, 3)).data_ptr() == take("scores", (3, 2)).data_ptr()
    True
    """
    private: dict[str, Tensor] = {}
    keep = device.type == "cpu" and not torch.is_inference_mode_enabled()
    shared: dict[str, Tensor] = vars(_thread_memory).setdefault(str(dtype), {}) if keep else private
    views: dict[tuple[str, Sequence[int]], Tensor] = {}

    def take(name: str, shape: Sequence[int]) -> Tensor:
        view = views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            buffers = shared if size <= TILE_ELEMENTS else private
            if name not in buffers or buffers[name].numel() < size:
                # The whole at once: growing tile by tile would leave holes; untouched memory costs nothing.
                buffers[name] = torch.empty(max(size, TILE_ELEMENTS), dtype=dtype, device=device)
                views.clear()
            view = views[name, shape] = buffers[name][:size].view(*shape)
        return view

    return take


def _by_group(x: Tensor, group: int) -> Tensor:
    """From axes that broadcast to (..., heads, rows, columns) to (..., kv_heads, group, rows, columns)."""
    if x.dim() < 3:
        return x
    return x.unflatten(-3, (-1, group)) if x.shape[-3] > 1 else x.unsqueeze(-3)
