"""Every statistic of attention in one pass over tiles of its scores: the engine behind `statistics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manyheads.nn.mask import Mask
from manyheads.nn.tiles import Hidden, Tile, exp_of_difference, scratch, tiles

# "local" counts the attention to positions at most this far away.
LOCAL = 8
# Keys whose moments are taken together. In float32 a spread is then right to 0.005 positions, at any length.
SEGMENT = 32
CORE = ("keys", "logsumexp", "entropy", "self", "previous", "next", "first")
FULL = (*CORE, "confidence", "collision", "distance", "distance_spread", "local", "largest_logit")


def collect(
    tile_scores: Callable[[Tile], tuple[Tensor, list[Hidden], Tensor | int]],
    mask: Mask,
    shape: Sequence[int],
    keys: int,
    like: Tensor,
    names: tuple[str, ...],
    features: Tensor | None,
) -> dict[str, Tensor]:
    """Run over the tiles for the names CORE or FULL; results are (batch, kv_heads, group, queries).

    ``tile_scores`` gives a tile's scores, what is hidden in them, and how many keys each query may attend to;
    ``shape`` is (batch, kv_heads, group, queries), ``like`` gives dtype and device.
    """
    offset, full = keys - shape[3], names == FULL
    seen = {name: like.new_zeros(shape) for name in names}
    for name in seen.keys() & {"logsumexp", "largest_logit"}:
        seen[name].fill_(-torch.inf)
    if features is not None:
        seen["features"] = like.new_zeros(*shape, features.shape[2])
    if full:
        seen["received"] = like.new_zeros(*shape[:3], keys)
    take = scratch(like.dtype, like.device)
    for tile in tiles(mask, shape, keys, offset):
        s, parts, count = tile_scores(tile)
        nothing = torch.as_tensor(count, device=s.device) == 0
        top = s.amax(-1, keepdim=True)
        e = exp_of_difference(s, top, parts, out=take("exp", s.shape))
        moments = _moments(e) if full else None
        total = (e.sum(-1) if moments is None else moments[..., 0].sum(-1)).masked_fill_(nothing, 1.0)
        inverse, log = total.reciprocal().masked_fill_(nothing, 0.0), total.log()
        top = top.squeeze(-1).masked_fill_(nothing, -torch.inf)
        found = {
            "keys": count,
            "logsumexp": log + top,
            "entropy": (log - s.mul_(e).sum(-1) * inverse).clamp_(min=0.0),
        } | _places(e, inverse, tile, offset, LOCAL if full else 1)
        if moments is not None:
            found |= _spread(e, moments, inverse, tile, offset, mask.causal)
            found["confidence"], found["largest_logit"] = inverse, top
            found["collision"] = (torch.linalg.vector_norm(e, dim=-1) * inverse).square_()
        if features is not None:
            part = features[tile.batch, None, None, tile.columns.start : tile.columns.stop]
            found["features"] = (e @ part) * inverse.unsqueeze(-1)
        if full:
            columns = slice(tile.columns.start, tile.columns.stop)
            from_tile = (inverse.unsqueeze(-2) @ e).squeeze(-2)
            seen["received"][tile.batch, tile.kv_heads, :, columns] += from_tile
        for name, value in found.items():
            target = tile.of_queries(seen[name])
            target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)
    return seen


def _places(e: Tensor, inverse: Tensor, tile: Tile, offset: int, reach: int) -> dict[str, Tensor]:
    """Weights at the query's own position and around it, and at the first key. e is p before its division."""
    here = torch.arange(tile.rows.start, tile.rows.stop, device=e.device) + offset - tile.columns.start
    around = here[:, None] + torch.arange(-reach, reach + 1, device=e.device)
    inside = (around >= 0) & (around < len(tile.columns))
    index = around.clamp(0, len(tile.columns) - 1).expand(*e.shape[:-1], -1)
    near = e.gather(-1, index) * inside * inverse.unsqueeze(-1)
    first = e[..., 0] * inverse if tile.columns.start == 0 else torch.zeros_like(inverse)
    places = {name: near[..., reach + step] for name, step in (("previous", -1), ("self", 0), ("next", 1))}
    return places | {"first": first} | ({"local": near.sum(-1)} if reach == LOCAL else {})


def _moments(e: Tensor) -> Tensor:
    """Mass and first two moments of each SEGMENT of keys around its own middle: (..., rows, segments, 3)."""
    t = torch.arange(SEGMENT, device=e.device, dtype=e.dtype) - SEGMENT // 2
    basis = torch.stack((torch.ones_like(t), t, t.square()), dim=-1)
    whole = e.shape[-1] // SEGMENT * SEGMENT
    segments = e[..., :whole].unflatten(-1, (-1, SEGMENT)) @ basis
    rest = e[..., whole:] @ basis[: e.shape[-1] - whole]
    return torch.cat((segments, rest.unsqueeze(-2)), dim=-2)


def _spread(
    e: Tensor, moments: Tensor, inverse: Tensor, tile: Tile, offset: int, causal: bool
) -> dict[str, Tensor]:
    """Mean distance from the query, and standard deviation of the position.

    E[j^2] - E[j]^2 would cancel at long lengths; moments of segments add up around the mean without that.
    """
    middle = (tile.rows.start + tile.rows.stop) // 2  # positions are counted from here
    like: Any = {"device": e.device, "dtype": e.dtype}
    i = torch.arange(tile.rows.start - middle, tile.rows.stop - middle, **like)
    j = torch.arange(tile.columns.start - middle - offset, tile.columns.stop - middle - offset, **like)
    mass, first, second = (moments * inverse[..., None, None]).unbind(-1)  # (..., rows, segments)
    centre = torch.arange(mass.shape[-1], **like) * SEGMENT + (
        tile.columns.start - middle - offset + SEGMENT // 2
    )
    mean = (first + centre * mass).sum(-1)
    around = centre - mean.unsqueeze(-1)
    variance = (second + 2 * around * first + around.square() * mass).sum(-1).clamp_(min=0.0)
    if causal:  # no key lies behind its query
        return {"distance": ((i - mean) * (inverse > 0)).clamp_(min=0.0), "distance_spread": variance.sqrt()}
    # Away from the tile's own queries i - j has one sign for a whole segment; among them, weight by weight.
    before = min(max(0, (tile.rows.start + offset - tile.columns.start) // SEGMENT), mass.shape[-1])
    behind = min(max(before, -(-(tile.rows.stop + offset - tile.columns.start) // SEGMENT)), mass.shape[-1])
    distance = i * mass[..., :before].sum(-1) - (first + centre * mass)[..., :before].sum(-1)
    distance += (first + centre * mass)[..., behind:].sum(-1) - i * mass[..., behind:].sum(-1)
    among = slice(before * SEGMENT, behind * SEGMENT)
    distance += (e[..., among] * (i[:, None] - j[among]).abs_()).sum(-1) * inverse
    return {"distance": distance, "distance_spread": variance.sqrt()}
