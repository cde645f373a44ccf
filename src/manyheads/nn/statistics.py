"""What each head does with its attention, in numbers, from queries and keys alone.

One pass over tiles of the scores gives every statistic at once; the (queries, keys) weights are never held.
All is computed in float32 at least, and the keys are centred first: softmax does not change when one vector
is taken from all keys, and what is left to round is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from manyheads.nn.attention import check_mask, check_shapes
from manyheads.nn.mask import Mask
from manyheads.nn.tiles import Tile, rectangle, scores, tiles

Which = Literal["core", "full"]

# "local" counts the attention to positions at most this far away.
LOCAL = 8
# Stands for -inf where p * s must stay 0 and not become NaN.
_HIDDEN = -1e30
# A bias at or below this is somebody's way of hiding a key (float16's lowest number is -65504).
_HIDING_BIAS = -3e4


@torch.no_grad()
def statistics(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    which: Which = "core",
    features: Tensor | None = None,
) -> dict[str, Tensor]:
    """Exact statistics of attention for every head and query, without its weights in memory.

    Takes what `attention` takes (no values), and returns a dictionary of tensors (batch, heads, queries).
    With p the query's weights and i its position:

    core
        ``keys`` how many keys it may attend to; ``logsumexp`` of its scores; ``entropy`` of p, in nats; the
        weight on
        its own position, the one before, the one after and the first key: ``self``, ``previous``, ``next``,
        ``first``.
    full
        also ``confidence`` max p; ``collision`` sum p^2, whose inverse is the effective number of keys;
        ``distance`` E|i - j|; ``distance_spread``, the standard deviation of j; ``local``, the weight on
        positions at most 8 away; ``largest_logit``; and ``received`` (batch, heads, keys), the weight each
        key gets from all queries.

    ``features`` (batch, keys, n) adds ``features`` (batch, heads, queries, n), their mean under p: give 0/1
    columns to know the share of attention on special tokens, on rare ones, on a segment.
    Queries that may attend to nothing have zero everywhere (and a logsumexp of -inf).

    >>> q = k = torch.zeros(1, 2, 4, 8)
    >>> seen = statistics(q, k, causal=True, which="full")
    >>> seen["entropy"][0, 0].exp()
    tensor([1., 2., 3., 4.])
    >>> seen["distance"][0, 0]
    tensor([0.0000, 0.5000, 1.0000, 1.5000])
    """
    check_shapes(q, k)
    joined = check_mask(q, k, mask, causal, window, chunk)
    exact = torch.promote_types(q.dtype, torch.float32)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    queries = q.to(exact).unflatten(1, (kv_heads, group))
    keys = k.to(exact)
    centre = (
        keys.mean(2, keepdim=True) if keys.shape[2] else keys.new_zeros(*keys.shape[:2], 1, keys.shape[3])
    )
    keys = keys - centre
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    offset = k.shape[2] - q.shape[2]

    def tile_scores(tile: Tile) -> tuple[Tensor, Tensor | int]:
        allowed, bias = rectangle(joined, offset, group, q.device, tile)
        s = scores(queries, keys, factor, tile, allowed, bias, _HIDDEN)
        return (s if bias is None else s.clamp_(min=_HIDDEN)), _count(allowed, bias, len(tile.columns))

    shift = factor * (queries @ centre[:, :, None].transpose(-2, -1)).squeeze(-1)
    return _collect(tile_scores, joined, shift, k.shape[2], which, features)


@torch.no_grad()
def statistics_of_scores(
    scores: Tensor, *, which: Which = "core", features: Tensor | None = None
) -> dict[str, Tensor]:
    """The same from scores somebody else materialised: (batch, heads, queries, keys), masks and biases added.

    >>> statistics_of_scores(torch.zeros(1, 1, 2, 4))["entropy"].exp()
    tensor([[[4., 4.]]])
    """
    if scores.dim() != 4:
        raise ValueError(f"scores: expected (batch, heads, queries, keys), got {tuple(scores.shape)}")
    exact = torch.promote_types(scores.dtype, torch.float32)

    def tile_scores(tile: Tile) -> tuple[Tensor, Tensor | int]:
        part = tile.of_queries(scores[:, :, None])[..., tile.columns.start : tile.columns.stop]
        s = part.to(exact, copy=True).clamp_(min=_HIDDEN)
        return s, (s > _HIDING_BIAS).sum(-1)

    shift = scores.new_zeros(scores.shape[:3], dtype=exact)[:, :, None]
    return _collect(tile_scores, Mask(), shift, scores.shape[3], which, features)


def _collect(
    tile_scores: Callable[[Tile], tuple[Tensor, Tensor | int]],
    mask: Mask,
    shift: Tensor,
    keys: int,
    which: Which,
    features: Tensor | None,
) -> dict[str, Tensor]:
    """Run over the tiles. ``shift`` (batch, kv_heads, group, queries): what centring took from the scores."""
    if which not in ("core", "full"):
        raise ValueError(f"which: expected 'core' or 'full', got {which!r}")
    batch, kv_heads, group, queries = shift.shape
    if features is not None and (features.dim() != 3 or features.shape[:2] != (batch, keys)):
        raise ValueError(
            f"features: expected (batch, keys, n) = ({batch}, {keys}, n), got {tuple(features.shape)}"
        )
    offset = keys - queries
    names = ["keys", "logsumexp", "entropy", "self", "previous", "next", "first"]
    if which == "full":
        names += ["confidence", "collision", "distance", "distance_spread", "local", "largest_logit"]
    seen = {name: torch.zeros_like(shift) for name in names}
    for name in seen.keys() & {"logsumexp", "largest_logit"}:
        seen[name].fill_(-torch.inf)
    if features is not None:
        features = features.to(shift.dtype)
        seen["features"] = shift.new_zeros(*shift.shape, features.shape[2])
    received = shift.new_zeros(batch, kv_heads, group, keys) if which == "full" else None
    for tile in tiles(mask, batch, kv_heads, group, queries, keys, offset):
        s, count = tile_scores(tile)
        top = s.amax(-1, keepdim=True)
        nothing = top <= _HIDDEN
        e = torch.exp(s.sub_(top.masked_fill(nothing, 0.0)))
        total = e.sum(-1)
        inverse = total.reciprocal().masked_fill_(nothing.squeeze(-1), 0.0)
        found = {
            "keys": count,
            "logsumexp": total.log() + top.squeeze(-1),
            "entropy": (total.log() - s.mul_(e).sum(-1) * inverse).nan_to_num_(0.0).clamp_(min=0.0),
        } | _places(e, inverse, tile, offset, which)
        if which == "full":
            found |= _spread(e, s, inverse, tile, offset)
            found["confidence"], found["largest_logit"] = inverse, top.squeeze(-1)
            found["collision"] = (torch.linalg.vector_norm(e, dim=-1) * inverse).square_()
        if features is not None:
            part = features[tile.batch, None, None, tile.columns.start : tile.columns.stop]
            found["features"] = (e @ part) * inverse.unsqueeze(-1)
        if received is not None:
            columns = slice(tile.columns.start, tile.columns.stop)
            received[tile.batch, tile.kv_heads, :, columns] += (inverse.unsqueeze(-2) @ e).squeeze(-2)
        for name, value in found.items():
            target = tile.of_queries(seen[name])
            target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)
    for name in seen.keys() & {"logsumexp", "largest_logit"}:
        seen[name] = torch.where(seen[name] <= _HIDDEN / 2, -torch.inf, seen[name] + shift)
    if received is not None:
        seen["received"] = received
    return {name: value.flatten(1, 2) for name, value in seen.items()}


def _count(allowed: Tensor | None, bias: Tensor | None, columns: int) -> Tensor | int:
    """How many keys each query of a tile may attend to."""
    if bias is not None:
        shown = bias > _HIDING_BIAS
        allowed = shown if allowed is None else allowed & shown
    if allowed is None:
        return columns
    return allowed.sum(-1) * (columns if allowed.shape[-1] == 1 else 1)


def _places(e: Tensor, inverse: Tensor, tile: Tile, offset: int, which: Which) -> dict[str, Tensor]:
    """Weights at the query's own position and around it, and at the first key. e is p before its division."""
    reach = LOCAL if which == "full" else 1
    here = (
        torch.arange(tile.rows.start, tile.rows.stop, device=e.device)[:, None] + offset - tile.columns.start
    )
    around = here + torch.arange(-reach, reach + 1, device=e.device)
    inside = (around >= 0) & (around < len(tile.columns))
    index = around.clamp(0, len(tile.columns) - 1).expand(*e.shape[:-1], -1)
    near = e.gather(-1, index) * inside * inverse.unsqueeze(-1)
    first = e[..., 0] * inverse if tile.columns.start == 0 else torch.zeros_like(inverse)
    places = {
        "previous": near[..., reach - 1],
        "self": near[..., reach],
        "next": near[..., reach + 1],
        "first": first,
    }
    return places | {"local": near.sum(-1)} if which == "full" else places


def _spread(e: Tensor, scratch: Tensor, inverse: Tensor, tile: Tile, offset: int) -> dict[str, Tensor]:
    """Mean distance from the query and standard deviation of the position, the second around its own mean:
    E[j^2] - E[j]^2 would cancel at long lengths."""
    i = torch.arange(tile.rows.start, tile.rows.stop, device=e.device, dtype=e.dtype)[:, None] + offset
    j = torch.arange(tile.columns.start, tile.columns.stop, device=e.device, dtype=e.dtype)
    middle = (tile.columns.start + tile.columns.stop) // 2
    mean = (e @ (j - middle)[:, None]).squeeze(-1) * inverse + middle
    spread = torch.sub(j, mean.unsqueeze(-1), out=scratch).square_().mul_(e).sum(-1) * inverse
    if tile.columns.stop <= tile.rows.start + offset + 1:  # all keys lie before all queries
        distance = (i.squeeze(-1) - mean) * (inverse > 0)
    else:
        distance = torch.mul(e, (i - j).abs_(), out=scratch).sum(-1) * inverse
    return {"distance": distance, "distance_spread": spread.sqrt()}
