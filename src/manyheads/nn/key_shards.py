"""Statistics of attention whose keys are spread over several processes: merged from shards, or by a ring.

Softmax over all keys is a mean of softmaxes over shards, each with the weight exp(its logsumexp - that of
all). So is nearly every statistic, or a simple function of such means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads.common.devices import in_float64
from manyheads.nn.attention import check_shapes, joined_mask
from manyheads.nn.mask import Mask
from manyheads.nn.statistics import StatisticsSet, statistics
from manyheads.nn.tile_statistics import STEPS
from manyheads.nn.tiles import HIDDEN

# Means under the weights of a query: those of the shards, weighted.
_MEANS = (*STEPS, "first", "local", "distance", "features")
_ONLY_OF_SHARDS = {"shard", "displacement"}
_MERGEABLE = {
    *_MEANS,
    *("keys", "logsumexp", "entropy", "largest_logit", "confidence", "collision", "distance_spread"),
    *_ONLY_OF_SHARDS,
}


@torch.no_grad()
def merge_statistics(parts: Sequence[Mapping[str, Tensor]], *, keys: int | None = None) -> dict[str, Tensor]:
    """The statistics of all keys, from those of shards of the keys (`statistics` with ``positions``).

    The parts may come from different processes and in any order. Every statistic of the sets core, logits and
    full can be merged, and ``features``; only ``received`` cannot, since the weight that a key gets from a
    query depends on the keys of all shards. ``keys`` with a floating mask: a shard whose scores are all a
    thousand below those of another has no weight and counts for nothing, as in `statistics` of all keys.

    Parameters
    ----------
    parts: what `statistics` returned for each shard, with the same queries and options.
    keys: how many keys there are. If given, parts that do not reach to the last are an error.

    Raises
    ------
    ValueError if parts overlap or leave a gap, were measured without ``positions``, or differ in statistics
    or queries.

    Examples
    --------
    >>> q, k = torch.randn(2, 1, 4, 7, 8)
    >>> shards = [(0, 3), (3, 7)]
    >>> parts = [statistics(q, k[:, :, a:b], causal=True, positions=(0, a)) for a, b in shards]
    >>> whole = statistics(q, k, causal=True)
    >>> merged = merge_statistics(parts, keys=7)
    >>> merged.keys() == whole.keys(), torch.allclose(merged["entropy"], whole["entropy"], atol=1e-5)
    (True, True)

    See Also
    --------
    statistics : of one shard, or of all keys.
    ring_statistics : shards on several processes, merged.

    References
    ----------
    Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
    Liu et al. 2023, Ring attention with blockwise transformers for near-infinite context.
    """
    parts = _sort_parts(parts, keys)
    like = parts[0]["entropy"]

    def stack_parts(name: str) -> Tensor:
        return torch.stack([in_float64(part[name]) for part in parts])

    logsumexp = stack_parts("logsumexp")
    total = logsumexp.logsumexp(0)
    # (parts, batch, heads, queries): each shard's share of a query's attention
    share = (logsumexp - total).exp().where(total > -torch.inf, 0.0)
    count = stack_parts("keys")
    if any(part["shard"][2] for part in parts):  # a floating mask hides by what it adds
        count *= logsumexp >= total - HIDDEN
        # In a row where every key is hidden like that, it leaves no digit of the scores: all are equal.
        equal = (total > -torch.inf) & (-total * torch.finfo(like.dtype).eps >= 1)
        share = torch.where(equal, count / count.sum(0).clamp(min=1), share)
    merged: dict[str, Tensor] = {"logsumexp": total, "keys": count.sum(0)}
    for name in parts[0].keys() - _ONLY_OF_SHARDS - merged.keys():
        value = stack_parts(name)
        if name == "entropy":
            merged[name] = (share * value - torch.xlogy(share, share)).sum(0)
        elif name == "largest_logit":
            merged[name] = value.amax(0)
        elif name == "confidence":
            merged[name] = (share * value).amax(0)
        elif name == "collision":
            merged[name] = (share.square() * value).sum(0)
        elif name == "distance_spread":
            merged[name] = _spread(share, value, stack_parts("displacement"))
        else:
            weights = share.unsqueeze(-1) if name == "features" else share
            merged[name] = (weights * value).sum(0)
    return {name: merged[name].to(like.dtype).to(like.device) for name in parts[0] if name in merged}


def _spread(share: Tensor, spread: Tensor, mean: Tensor) -> Tensor:
    """The standard deviation of all, from those of the shards and from their means, (parts, ...) each.

    Differences between means of shards: less the mean of all, small ones would cancel.
    """
    variance = (share * spread.square()).sum(0)
    for n in range(len(share)):
        for other in range(n):
            variance += share[n] * share[other] * (mean[n] - mean[other]).square()
    return variance.sqrt()


def _sort_parts(parts: Sequence[Mapping[str, Tensor]], keys: int | None) -> list[Mapping[str, Tensor]]:
    """The parts by their first key, after a look at whether they fit together."""
    if not parts:
        raise ValueError("parts: expected the statistics of at least one shard, got none")
    first = parts[0]
    for n, part in enumerate(parts):
        unknown = part.keys() - _MERGEABLE
        if "shard" not in part:
            raise ValueError(
                f"parts: part {n} does not say which keys it covers; measure each shard with "
                "statistics(..., positions=(first query, first key))"
            )
        if unknown:
            raise ValueError(f"parts: {', '.join(sorted(unknown))} of part {n} cannot be merged")
        if part.keys() != first.keys():
            raise ValueError(
                f"parts: part {n} has {', '.join(sorted(part))}, and part 0 {', '.join(sorted(first))}; "
                "measure all shards with the same statistics and features"
            )
        for name in part.keys() - {"shard"}:
            if part[name].shape != first[name].shape:
                raise ValueError(
                    f"parts: {name} of part {n} is {tuple(part[name].shape)}, of part 0 "
                    f"{tuple(first[name].shape)}; expected the same queries in all"
                )
    parts = sorted(parts, key=lambda part: part["shard"].tolist())
    end = 0
    for part in parts:
        start, stop = part["shard"][:2].tolist()
        if start != end:
            fault = "a part is there twice, or parts overlap" if start < end else "a part is missing"
            raise ValueError(f"parts: expected keys from {end} on, got {start} to {stop}: {fault}")
        end = stop
    if keys is not None and end != keys:
        raise ValueError(f"parts: they reach to key {end}, but there are {keys}: a part is missing")
    return list(parts)


class _Shard(NamedTuple):
    """What the processes tell each other before the first keys travel: all raise, or none."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    features: tuple[int, ...] | None
    dtype: torch.dtype
    options: dict[str, object]
    fault: str | None  # what is wrong with the tensors of this process alone


def ring_statistics(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    statistics: StatisticsSet = "core",
    features: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """`statistics` where each process of a group holds consecutive queries and keys of one sequence.

    Keys travel around the ring of processes, and each process measures its queries against those that it has
    at the moment: none ever holds more than two shards. It takes what `statistics` takes, except mask tensors
    (lengths count from the first key of the whole sequence), and returns the statistics of this process's
    queries over all keys, without ``received``. Every process of the group must call it.

    Parameters
    ----------
    q: (batch, heads, queries here, d_key); processes in the order of their ranks hold consecutive queries.
    k: (batch, kv_heads, keys here, d_key), in the same order; shards may differ in length.
    features: (batch, keys here, n).
    group: the processes; default all of `torch.distributed`. Without it, this process holds everything.

    Examples
    --------
    >>> q, k = torch.randn(2, 1, 4, 7, 8)
    >>> alone = ring_statistics(q, k, causal=True)  # under torchrun, each process gives its shards
    >>> alone["entropy"].shape
    torch.Size([1, 4, 7])

    See Also
    --------
    merge_statistics : for other ways to spread keys.
    statistics : all keys in one process.

    References
    ----------
    Liu et al. 2023, Ring attention with blockwise transformers for near-infinite context.
    """
    whole_mask = joined_mask(mask, causal, window, chunk)
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
    shards = [_describe_shard(q, k, whole_mask, scale, statistics, features)] * size
    if size > 1:
        dist.all_gather_object(shards, shards[0], group)
    _check_ring(shards)
    ends = torch.tensor([[shard.q[2], shard.k[2]] for shard in shards]).cumsum(0).tolist()
    starts = [[0, 0], *ends]
    first_query = starts[rank][0] + ends[-1][1] - ends[-1][0]
    parts: list[dict[str, Tensor]] = []
    tensors = [k] if features is None else [k, features]
    for step in range(size):
        source = (rank - step) % size
        arriving = tensors
        transfers: list[dist.Work] = []
        if step + 1 < size:
            arriving, transfers = _pass_on(tensors, shards[(source - 1) % size], rank, size, group)
        parts.append(_measure(q, tensors, whole_mask, scale, statistics, (first_query, starts[source][1])))
        for transfer in transfers:
            transfer.wait()
        tensors = arriving
    return merge_statistics(parts, keys=ends[-1][1])


def _describe_shard(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    scale: float | None,
    statistics_set: StatisticsSet,
    features: Tensor | None,
) -> _Shard:
    fault = None
    try:
        check_shapes(q, k)
    except (ValueError, TypeError) as error:
        fault = str(error)
    tensors = {"lengths": mask.lengths, "slopes": mask.slopes}
    options: dict[str, object] = {
        "causal": mask.causal,
        "window": mask.window,
        "chunk": mask.chunk,
        **{name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()},
        "mask tensors": len(mask.tensors),
        "scale": scale,
        "statistics": statistics_set,
    }
    shape = None if features is None else tuple(features.shape)
    return _Shard(tuple(q.shape), tuple(k.shape), shape, k.dtype, options, fault)


def _measure(
    q: Tensor,
    tensors: list[Tensor],
    mask: Mask,
    scale: float | None,
    statistics_set: StatisticsSet,
    positions: tuple[int, int],
) -> dict[str, Tensor]:
    features = tensors[1] if len(tensors) > 1 else None
    stats: dict[str, Tensor] = statistics(
        q,
        tensors[0],
        mask=mask,
        scale=scale,
        statistics=statistics_set,
        features=features,
        positions=positions,
    )
    return stats


def _pass_on(
    tensors: list[Tensor], shard: _Shard, rank: int, size: int, group: dist.ProcessGroup | None
) -> tuple[list[Tensor], list[dist.Work]]:
    """Send what is held to the next process and receive what the one before holds, meanwhile."""
    shapes = [shard.k] if shard.features is None else [shard.k, shard.features]
    arriving = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
    next_rank, previous_rank = ((rank + step) % size for step in (1, -1))
    if group is not None:
        next_rank, previous_rank = (dist.get_global_rank(group, n) for n in (next_rank, previous_rank))
    operations = [dist.P2POp(dist.isend, x.contiguous(), next_rank, group) for x in tensors]
    operations += [dist.P2POp(dist.irecv, x, previous_rank, group) for x in arriving]
    return arriving, dist.batch_isend_irecv(operations)


def _check_ring(shards: list[_Shard]) -> None:
    """Raise, on every process alike, unless the shards are of one sequence."""
    first = shards[0]
    start = 0
    for rank, shard in enumerate(shards):
        if shard.fault is not None:
            raise ValueError(f"process {rank}: {shard.fault}")
        for name, x, y in (("q", shard.q, first.q), ("k", shard.k, first.k)):
            if (*x[:2], *x[3:]) != (*y[:2], *y[3:]):
                raise ValueError(
                    f"{name}: process {rank} has {x}, process 0 {y}; expected (batch, heads, length, width) "
                    "that differ in length alone"
                )
        if (shard.dtype, shard.options) != (first.dtype, first.options):
            raise ValueError(
                f"ring: process {rank} was called with {shard.dtype} {shard.options}, process 0 with "
                f"{first.dtype} {first.options}; expected the same"
            )
        expected = None if first.features is None else (shard.k[0], shard.k[2], first.features[-1])
        if shard.features != expected:
            raise ValueError(f"features: process {rank} has {shard.features}, expected {expected}")
        chunk = shard.options["chunk"]
        if isinstance(chunk, int) and start % chunk:
            raise ValueError(
                f"chunk: the keys of process {rank} begin at {start}; expected a multiple of {chunk}"
            )
        if shard.options["mask tensors"]:
            raise ValueError(
                "mask: a tensor does not travel with the keys; give causal, window, chunk or lengths, or "
                "measure the shards with statistics(..., positions=) and use merge_statistics"
            )
        start += shard.k[2]
