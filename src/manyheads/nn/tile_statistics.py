"""Every statistic of attention in one pass over tiles of its scores: the engine behind `statistics`.

A tile yields sums of e = exp(s) only, in few operations while it is in the cache. The statistics follow from
the sums at the end, for all queries at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.common.devices import for_float64, in_float64
from manyheads.nn.mask import Mask
from manyheads.nn.tiles import Hidden, Tile, exp_of_difference, exp_of_weighty, hide, scratch, tiles

# "local" counts the attention to positions at most this far away.
LOCAL = 8
# Keys whose moments are taken together. In float32 a spread is then right to 0.01 positions, at any length.
SEGMENT = 32
# Scores of a tile: 2^18 of them and their exp would stay in the processor's own cache, but so small a tile is
# done before the next operations have started. 2^21 is where the full set was fastest.
ELEMENTS = 2**21
# Sums of exp(s) within these bounds have lost nothing, nor have sums of squares. Others are taken again from
# scores less the largest of their query.
SAFE = 1e-12, 1e18
CORE = ("keys", "logsumexp", "entropy", "self", "previous", "next", "first")
LOGITS = (*CORE, "largest_logit")
FULL = (*CORE, "confidence", "collision", "distance", "distance_spread", "local", "largest_logit")

STEPS = {"previous": -1, "self": 0, "next": 1}
SUMS = ("keys", "shift", "total", "weighted", "first", *STEPS)
_FULL_SUMS = (*SUMS, "largest", "norm", "local", "among")


class Scores(NamedTuple):
    """The scores of a tile."""

    s: Tensor  # (batch, kv_heads, group, rows, columns), nothing hidden
    parts: list[Hidden]
    # how many keys each query may attend to; without it, those whose weight is not zero (nothing is in parts)
    number: Tensor | int | None


TileScores = Callable[[Tile], Scores]


def collect(
    tile_scores: TileScores,
    mask: Mask,
    shape: Sequence[int],
    keys: int,
    like: Tensor,
    names: tuple[str, ...],
    features: Tensor | None,
    careful: bool = False,
    offset: int | None = None,
) -> dict[str, Tensor]:
    """Run over the tiles for the names CORE, LOGITS or FULL; results are (batch, kv_heads, group, queries).

    ``shape`` is (batch, kv_heads, group, queries), ``like`` gives dtype and device, ``offset`` is the
    position of query 0 (by default the last query is at the last key).
    The full set also has ``displacement``, E[j - i], in float64 (`for_float64`). Unless ``careful``, exp
    is taken of the scores as they are, and only where that fails of scores less their largest.
    """
    offset, full = keys - shape[3] if offset is None else offset, names == FULL
    sum_names = _FULL_SUMS if full else (*SUMS, "largest") if names == LOGITS else SUMS
    raw = like.new_zeros(len(sum_names), *shape)
    received = like.new_zeros(*shape[:3], keys) if full else None
    exact = for_float64(like.device)
    moments = torch.zeros(*shape, 5, dtype=torch.float64, device=exact) if full else None
    means = None if features is None else like.new_zeros(*shape, features.shape[2])
    take, grid, basis = scratch(like.dtype, like.device), None, _basis(like)
    for tile in tiles(mask, shape, keys, offset, ELEMENTS):
        s, parts, count = tile_scores(tile)
        rows = tile.of_queries(raw, 1)
        tile_sums = dict(zip(sum_names, rows.unbind(), strict=True))
        columns = s.shape[-1]
        e = wide = take("exp", (*s.shape[:-1], -(-columns // SEGMENT) * SEGMENT))
        if wide.shape[-1] > columns:
            e = wide[..., :columns]
            wide[..., columns:] = 0.0
        if count is None:
            top, count = exp_of_weighty(s, out=e)
            tile_sums["shift"].copy_(top.squeeze(-1))
        elif careful:
            hide(s, parts)
            top = s.amax(-1, keepdim=True)
            exp_of_difference(s, top, parts, out=e)
            tile_sums["shift"].copy_(top.squeeze(-1))
        else:
            torch.exp(s, out=e)
            for part, _, keep in parts:
                if keep is not None:
                    e[..., part] *= keep
        tile_sums["keys"].copy_(count) if isinstance(count, Tensor) else tile_sums["keys"].fill_(count)
        torch.sum(e, -1, out=tile_sums["total"])
        if not careful:
            _recompute_lost(tile_sums, s, e, parts, count)
        if isinstance(count, Tensor):
            tile_sums["total"].masked_fill_(count == 0, 0.0)
        torch.sum(s.mul_(e), -1, out=tile_sums["weighted"])
        copy_diagonals(tile_sums, e, tile.rows, tile.columns, offset, mask.causal)
        if means is not None and features is not None:
            tile_features = features[tile.batch, None, None, tile.columns.start : tile.columns.stop]
            tile.of_queries(means).copy_(e @ tile_features)
        if "largest" in tile_sums:
            torch.amax(e, -1, out=tile_sums["largest"])
        if received is not None and moments is not None:
            if grid is None or (grid.rows, grid.columns) != (tile.rows, tile.columns):
                grid = _grid(tile, offset, like)
            _add_full(tile_sums, e, grid, mask.causal)
            index = tile.batch, tile.kv_heads, slice(None), slice(tile.columns.start, tile.columns.stop)
            received[index] += (reciprocal(tile_sums["total"]).unsqueeze(-2) @ e).squeeze(-2)
            segments = (wide.view(-1, SEGMENT) @ basis).view(*wide.shape[:-1], -1)
            tile.of_queries(moments).copy_(in_float64(segments) @ grid.weights)
    sums = dict(zip(sum_names, raw.unbind(), strict=True))
    stats = core_statistics(sums)
    if "largest" in sums:
        logit = sums["largest"].log() + sums["shift"]
        stats["largest_logit"] = logit.masked_fill_(sums["total"] == 0, -torch.inf)
    if means is not None:
        stats["features"] = means.mul_(reciprocal(sums["total"]).unsqueeze(-1))
    if received is not None and moments is not None:
        stats |= _full_statistics(sums, moments, offset, mask.causal) | {"received": received}
    return stats


def _safe(total: Tensor, count: Tensor | int) -> bool:
    if isinstance(count, Tensor):
        total = total.masked_fill((count == 0) & (total == 0), 1.0)
    low, high = torch.aminmax(total)
    return SAFE[0] < low.item() and high.item() < SAFE[1]


def _recompute_lost(
    tile_sums: dict[str, Tensor], s: Tensor, e: Tensor, parts: list[Hidden], count: Tensor | int
) -> None:
    """Where exp overflowed or vanished, take it again of scores less the largest of their query."""
    total = tile_sums["total"]
    if _safe(total, count):
        return
    lost = ((total > SAFE[0]) & (total < SAFE[1])).logical_not_()
    if isinstance(count, Tensor):
        is_empty = lost & (count == 0)  # a hidden score whose exp is infinite made NaN of their zeros
        s[is_empty], e[is_empty] = 0.0, 0.0
        lost &= count > 0
    index = lost.nonzero(as_tuple=True)
    hidden_rows = [
        Hidden(part, None, keep.expand(*s.shape[:-1], -1)[index])
        for part, _, keep in parts
        if keep is not None
    ]
    lost_scores = s[index]
    hide(lost_scores, hidden_rows)
    top = lost_scores.amax(-1, keepdim=True)
    exps = exp_of_difference(lost_scores, top, hidden_rows, out=torch.empty_like(lost_scores))
    s[index], e[index] = lost_scores, exps
    total[index], tile_sums["shift"][index] = exps.sum(-1), top.squeeze(-1)


def reciprocal(total: Tensor) -> Tensor:
    return total.reciprocal().masked_fill_(total == 0, 0.0)


def copy_diagonals(
    tile_sums: dict[str, Tensor], e: Tensor, rows: range, columns: range, offset: int, causal: bool
) -> None:
    """The entries of e (..., rows, columns) at the query's own position, beside it, and at the first key."""
    if columns.start == 0:
        tile_sums["first"].copy_(e[..., 0])
    diagonal = rows.start + offset - columns.start
    for name, step in STEPS.items():
        start = max(0, -diagonal - step)
        if start < len(rows) and diagonal + step < len(columns) and not (causal and step > 0):
            entries = e.diagonal(diagonal + step, -2, -1)
            tile_sums[name][..., start : start + entries.shape[-1]] = entries


class _Grid(NamedTuple):
    """What tiles with the same rows and columns have in common."""

    rows: range
    columns: range
    near: Tensor  # (rows, 2 * LOCAL + 1) the columns around each query's own
    inside: Tensor  # 1 where there is such a column, else 0
    among: slice  # the columns of segments that are neither all before nor all behind every query
    distance: Tensor  # (rows, among) from the query
    weights: Tensor  # (segments * 3, 5) from mass and moments of segments to those of all, in float64


def _grid(tile: Tile, offset: int, like: Tensor) -> _Grid:
    columns, segments = len(tile.columns), -(-len(tile.columns) // SEGMENT)
    start, stop = (i + offset - tile.columns.start for i in (tile.rows.start, tile.rows.stop))
    position = torch.arange(start, stop, device=like.device)[:, None]
    near = position + torch.arange(-LOCAL, LOCAL + 1, device=like.device)
    inside = ((near >= 0) & (near < columns)).to(like.dtype)
    before = min(max(0, start // SEGMENT), segments)
    behind = min(max(before, -(-stop // SEGMENT)), segments)
    among = slice(min(before * SEGMENT, columns), min(behind * SEGMENT, columns))
    distance = (position - torch.arange(among.start, among.stop, device=like.device)).abs_().to(like.dtype)
    number = torch.arange(segments, device=for_float64(like.device))
    c = (tile.columns.start + number * SEGMENT + SEGMENT // 2).to(torch.float64)
    sign = (number < before).to(torch.float64) - (number >= behind).to(torch.float64)
    none, one = torch.zeros_like(c), torch.ones_like(c)
    of_mass = torch.stack((one, c, c * c, sign, sign * c), dim=-1)
    of_first = torch.stack((none, one, 2 * c, none, sign), dim=-1)
    of_second = torch.stack((none, none, one, none, none), dim=-1)
    weights = torch.stack((of_mass, of_first, of_second), dim=1).flatten(0, 1)
    return _Grid(tile.rows, tile.columns, near.clamp_(0, columns - 1), inside, among, distance, weights)


def _basis(like: Tensor) -> Tensor:
    """From the weights of a segment to its mass and first two moments around its middle."""
    t = torch.arange(SEGMENT, device=like.device, dtype=like.dtype) - SEGMENT // 2
    return torch.stack((torch.ones_like(t), t, t.square()), dim=-1)


def _add_full(tile_sums: dict[str, Tensor], e: Tensor, grid: _Grid, causal: bool) -> None:
    """The square, what is nearby, and the distance among the tile's own queries."""
    torch.linalg.vector_norm(e, dim=-1, out=tile_sums["norm"])
    near = e.gather(-1, grid.near.expand(*e.shape[:-1], -1))
    torch.sum(near.mul_(grid.inside), -1, out=tile_sums["local"])
    if not causal:
        torch.sum(e[..., grid.among] * grid.distance, -1, out=tile_sums["among"])


def core_statistics(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the sums over all tiles say; queries that may attend to nothing have a total of zero."""
    is_empty, inverse = raw["total"] == 0, reciprocal(raw["total"])
    log = raw["total"].masked_fill(is_empty, 1.0).log_()
    stats = {
        "keys": raw["keys"],
        "logsumexp": (log + raw["shift"]).masked_fill_(is_empty, -torch.inf),
        "entropy": (log - raw["weighted"] * inverse).clamp_(min=0.0),
    }
    return stats | {name: raw[name] * inverse for name in (*STEPS, "first")}


def _full_statistics(raw: dict[str, Tensor], moments: Tensor, offset: int, causal: bool) -> dict[str, Tensor]:
    """What the full set has besides. E[j^2] - E[j]^2 would cancel in float32; in float64 it does not matter,
    given that the mass is the sum of the very same numbers.
    """
    inverse = reciprocal(raw["total"])
    is_empty, among = (x.to(moments.device) for x in (raw["total"] == 0, raw["among"]))
    mass, first, second, signed_mass, signed_first = moments.unbind(-1)
    inverse_mass = reciprocal(mass).masked_fill_(is_empty, 0.0)
    mean = first * inverse_mass
    i = torch.arange(offset, offset + mass.shape[-1], device=mass.device, dtype=mass.dtype)
    # |i - j| is i - j for segments before the queries, j - i for those behind; among them it was summed.
    distance = i * mass - first if causal else i * signed_mass - signed_first + among
    spread = (second * inverse_mass - mean * mean).clamp_(min=0.0).sqrt_()
    return {
        "confidence": raw["largest"] * inverse,
        "collision": (raw["norm"] * inverse).square_(),
        "distance": (distance * inverse_mass).clamp_(min=0.0).to(inverse.dtype).to(inverse.device),
        "distance_spread": spread.to(inverse.dtype).to(inverse.device),
        "local": raw["local"] * inverse,
        "displacement": (mean - i).masked_fill_(is_empty, 0.0),
    }
