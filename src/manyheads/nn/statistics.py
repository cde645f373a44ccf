"""Statistics of every head's attention, from queries and keys alone.

The core set comes from sums over blocks of scores, the full set from one pass over tiles; the (queries, keys)
weights are never held. Everything is computed in float32 at least, with centred keys: softmax does not change
when one vector is subtracted from all keys, and rounding errors shrink.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from manyheads.common.devices import in_float64
from manyheads.nn import block_statistics
from manyheads.nn.attention import check_mask, check_shapes, default_scale
from manyheads.nn.mask import Mask
from manyheads.nn.tile_statistics import CORE, FULL, LOGITS, Scores, collect
from manyheads.nn.tiles import Hidden, Tile, hidden, mean_key, products, scratch

StatisticsSet = Literal["core", "logits", "full"]
_SETS = {"core": CORE, "logits": LOGITS, "full": FULL}


# It branches on values of its sums, which a compiled graph cannot.
@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    statistics: StatisticsSet = "core",
    features: Tensor | None = None,
    positions: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Exact statistics of attention for every head and query, without its weights in memory.

    Takes what `attention` takes (no values), and returns a dictionary of tensors (batch, heads, queries).
    With p the query's weights and i its position:

    core
        ``keys`` how many keys it may attend to (with a floating mask: those whose weight is not zero);
        ``logsumexp`` of its scores; ``entropy`` of p, in nats;
        ``self``, ``previous``, ``next``, ``first``: the weight on its own position, the one before, the one
        after, and the first key.
    logits
        also ``largest_logit``, the largest of its scores.
    full
        also ``largest_logit``; ``confidence`` max p; ``collision`` sum p^2, whose inverse is the effective
        number of keys; ``distance`` E|i - j|; ``distance_spread``, the standard deviation of j; ``local``,
        the weight on positions at most 8 away; and ``received`` (batch, heads, keys), the weight each key
        gets from all queries.

    ``features`` (batch, keys, n) adds ``features`` (batch, heads, queries, n), their mean under p: pass 0/1
    columns to get the share of attention on special tokens, on rare ones, on a segment.
    Queries that may attend to nothing have zero everywhere (and a logsumexp of -inf).

    ``positions``, of the first query and the first key in the whole sequence, says that these keys are a
    shard: the softmax is over them alone, and `merge_statistics` makes the statistics of all keys from those
    of all shards. Mask tensors and features are those of the shard; key lengths count from the first key of
    the whole. There is no ``received``, which cannot be merged; ``shard`` and, in the full set,
    ``displacement`` E[j - i] are what merging also needs, and logsumexp and largest_logit are in float64.

    Examples
    --------
    >>> q = k = torch.zeros(1, 2, 4, 8)
    >>> stats = statistics(q, k, causal=True, statistics="full")
    >>> stats["entropy"][0, 0].exp()
    tensor([1., 2., 3., 4.])
    >>> stats["distance"][0, 0]
    tensor([0.0000, 0.5000, 1.0000, 1.5000])

    See Also
    --------
    statistics_of_scores : the same from scores.
    merge_statistics, ring_statistics : keys that are spread over several processes.
    watch : the statistics of every head of a model, summed over a corpus.

    References
    ----------
    Voita et al. 2019, Analyzing multi-head self-attention: specialized heads do the heavy lifting, the rest
    can be pruned (confidence, positional heads).
    Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
    """
    check_shapes(q, k)
    whole_mask = check_mask(q, k, mask, causal, window, chunk)
    offset = k.shape[2] - q.shape[2]
    if positions is not None:
        whole_mask, offset = _shard_mask(whole_mask, positions)
    exact = torch.promote_types(q.dtype, torch.float32)
    names, features = _check(statistics, features, q.shape[0], k.shape[2], exact)
    group = q.shape[1] // k.shape[1]
    queries = q.to(exact).unflatten(1, (k.shape[1], group))
    factor = default_scale(q.shape[-1]) if scale is None else scale
    keys = k.to(exact)
    mean = mean_key(keys)
    if statistics == "core" and block_statistics.pays(q, k, whole_mask):
        stats = block_statistics.core(queries, keys, mean, whole_mask, factor, offset, features)
        return _finish(stats, queries, mean, factor, whole_mask, positions, k.shape[2])
    take, query_lengths = scratch(exact, q.device), whole_mask.queries
    visible = replace(whole_mask, queries=None)  # rows of queries that attend to nothing need no hiding
    # A floating mask hides what it gives no weight.
    has_bias = any(tensor.is_floating_point() for tensor in whole_mask.tensors)
    hidden_parts: dict[tuple[int, range, range], tuple[list[Hidden], Tensor | int]] = {}  # of the last tile
    centred_keys: dict[int, Tensor] = {}  # the keys of its sequences

    def tile_scores(tile: Tile) -> Scores:
        tile_key = 0 if whole_mask.lengths is None else tile.batch.start, tile.rows, tile.columns
        if tile_key not in hidden_parts or whole_mask.tensors or whole_mask.slopes is not None:
            hidden_parts.clear()
            hidden_parts[tile_key] = hidden(visible, offset, group, keys, tile)
        parts, count = hidden_parts[tile_key]
        if query_lengths is not None:
            i = torch.arange(tile.rows.start, tile.rows.stop, device=q.device)
            count = count * (i < query_lengths[tile.batch].to(q.device)[:, None, None, None])
        if tile.batch.start not in centred_keys:
            centred_keys.clear()
            k = keys[tile.batch]
            centred_keys[tile.batch.start] = torch.sub(
                k, mean[tile.batch].unsqueeze(2), out=take("keys", k.shape)
            )
        part = centred_keys[tile.batch.start][:, tile.kv_heads, tile.columns.start : tile.columns.stop]
        s = products(tile.of_queries(queries) * factor, part, parts, take)
        if not has_bias:
            return Scores(s, parts, count)
        for columns, _, keep in parts:
            if keep is not None:
                s[..., columns].masked_fill_(keep == 0, -torch.inf)
        if isinstance(count, Tensor):
            s.masked_fill_((count == 0).unsqueeze(-1), -torch.inf)
        return Scores(s, [], None)

    careful = q.device.type != "cpu"  # looking at numbers would make a GPU wait
    shape = queries.shape[:4]
    stats = collect(tile_scores, whole_mask, shape, k.shape[2], keys, names, features, careful, offset)
    return _finish(stats, queries, mean, factor, whole_mask, positions, k.shape[2])


def _shard_mask(mask: Mask, positions: tuple[int, int]) -> tuple[Mask, int]:
    """The mask as the keys of a shard see it, and the position of query 0 counted from their first."""
    for number in positions:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"positions: expected two whole numbers, got {positions!r}")
    query, key = positions
    if key < 0:
        raise ValueError(f"positions: expected a first key at 0 or later, got {key}")
    if mask.chunk is not None and key % mask.chunk:
        raise ValueError(
            f"positions: the first key is at {key}, and pieces of {mask.chunk} begin at its multiples; with "
            "chunk=, let shards begin there, too"
        )
    lengths = None if mask.lengths is None else (mask.lengths - key).clamp(min=0)
    return replace(mask, lengths=lengths), query - key


def _finish(
    stats: dict[str, Tensor],
    q: Tensor,
    mean: Tensor,
    scale: float,
    mask: Mask,
    positions: tuple[int, int] | None,
    keys: int,
) -> dict[str, Tensor]:
    """Add what the scores lack by the centring of the keys, and join the heads of all groups.

    Of a shard, logits are in float64: weights of shards are exp of their differences.
    """
    displacement = stats.pop("displacement", None)
    logits = stats.keys() & {"logsumexp", "largest_logit"}
    if positions is None:
        correction = scale * (q @ mean[:, :, None, :, None]).squeeze(-1)
        stats |= {name: stats[name] + correction for name in logits}
        return {name: value.flatten(1, 2) for name, value in stats.items()}
    parts = [in_float64(q[:, head]) @ in_float64(mean[:, head, None, :, None]) for head in range(q.shape[1])]
    correction = scale * torch.stack(parts, dim=1).squeeze(-1)
    stats |= {name: in_float64(stats[name]) + correction for name in logits}
    stats.pop("received", None)  # each query's share of this shard is missing in it
    if displacement is not None:
        stats["displacement"] = displacement
    if positions[1] > 0:
        stats["first"].zero_()
    stats = {name: value.flatten(1, 2) for name, value in stats.items()}
    by_weight = any(tensor.is_floating_point() for tensor in mask.tensors)
    stats["shard"] = torch.tensor([positions[1], positions[1] + keys, by_weight])
    return stats


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def statistics_of_scores(
    scores: Tensor, *, statistics: StatisticsSet = "core", features: Tensor | None = None
) -> dict[str, Tensor]:
    """The statistics of `statistics`, from scores (batch, heads, queries, keys) with masks and biases added.

    ``keys`` counts those whose weight is not zero: a score of -inf, or one a thousand below its query's
    largest, where exp underflows in every dtype, hides its key. A query whose scores are all -1e9 attends to
    all keys equally, as a softmax of them does.

    Examples
    --------
    >>> statistics_of_scores(torch.zeros(1, 1, 2, 4))["entropy"].exp()
    tensor([[[4., 4.]]])

    See Also
    --------
    statistics : from queries and keys, without the scores in memory.

    References
    ----------
    Voita et al. 2019, Analyzing multi-head self-attention: specialized heads do the heavy lifting, the rest
    can be pruned.
    """
    if scores.dim() != 4:
        raise ValueError(f"scores: expected (batch, heads, queries, keys), got {tuple(scores.shape)}")
    exact = torch.promote_types(scores.dtype, torch.float32)
    names, features = _check(statistics, features, scores.shape[0], scores.shape[3], exact)
    grouped, take = scores.unsqueeze(2), scratch(exact, scores.device)

    def tile_scores(tile: Tile) -> Scores:
        part = tile.of_queries(grouped)[..., tile.columns.start : tile.columns.stop]
        return Scores(take("scores", part.shape).copy_(part), [], None)

    like = torch.empty(0, dtype=exact, device=scores.device)
    shape = grouped.shape[:4]
    stats = collect(tile_scores, Mask(), shape, scores.shape[3], like, names, features, careful=True)
    stats.pop("displacement", None)
    return {name: value.flatten(1, 2) for name, value in stats.items()}


def _check(
    statistics: str, features: Tensor | None, batch: int, keys: int, dtype: torch.dtype
) -> tuple[tuple[str, ...], Tensor | None]:
    """The names in a set of statistics, and the features in the dtype of the computation."""
    if statistics not in _SETS:
        raise ValueError(f"statistics: expected 'core', 'logits' or 'full', got {statistics!r}")
    if features is not None:
        if features.dim() != 3 or features.shape[:2] != (batch, keys):
            expected = f"(batch, keys, n) = ({batch}, {keys}, n)"
            raise ValueError(f"features: expected {expected}, got {tuple(features.shape)}")
        features = features.to(dtype)
    return _SETS[statistics], features
