"""From one attention call to its statistics per head and query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.capture.call import Call
from manyheads.capture.mask_reading import Visible
from manyheads.common.devices import for_float64, in_float64
from manyheads.nn.statistics import StatisticsSet, statistics, statistics_of_scores

CORE = ("entropy", "entropy_normalised", "self", "previous", "next", "first", "output_norm")
LOGITS = (*CORE, "largest_logit")
FULL = (*CORE, "effective_keys", "confidence", "distance", "distance_spread", "local", "largest_logit")
# What has no meaning when queries and keys stand in different sequences.
OF_ONE_SEQUENCE = frozenset({"self", "previous", "next", "distance", "local"})
# What has none, besides, when the keys are a part of their sequence, in an order of their own, or several
# sequences side by side.
OF_WHOLE_KEYS = frozenset({"first", "distance_spread"})


def measure(
    call: Call,
    visibility: Visible,
    chosen: StatisticsSet,
    features: Tensor | None = None,
    rows: Tensor | None = None,
) -> dict[str, Tensor]:
    """The metrics of `CORE`, `LOGITS` or `FULL` for each query, and the number of ``keys`` it may attend to.

    Each is (batch, heads, queries); ``features`` (batch, heads, queries, n) and ``received`` (batch, heads,
    keys) where asked for. Keys past the last query (a cache that is not yet full) are left out, and so are
    queries where ``rows`` (batch, queries) is False: they attend to nothing. What has no meaning in the call
    is absent.
    """
    keys, start = visibility.keys, call.memory[0]
    if call.signed:
        return _of_signed(call, visibility)
    if features is not None:
        features = features[:, start : start + keys].expand(call.output.shape[0], -1, -1)
    if call.scores is not None:
        left, right = call.sinks[0] + start, call.sinks[1] + call.memory[1]
        scores = call.scores[..., left : left + keys]
        if rows is not None:
            scores = scores.masked_fill(~rows[:, None, :, None], -torch.inf)
        metrics = statistics_of_scores(scores, statistics=chosen, features=features)
        if call.modified:
            _scale_shares(metrics, scores)
        if left or right:
            end = call.scores.shape[-1] - right
            metrics = _with_sinks(
                metrics, scores, torch.cat([call.scores[..., :left], call.scores[..., end:]], -1)
            )
    elif call.query is not None and call.key is not None:
        key, mask = call.key[:, :, :keys], visibility.mask
        group = call.site.heads // (max(call.site.kv_heads) + 1)
        if key.shape[1] == call.site.heads and call.site.kv_heads == tuple(
            h // group for h in range(call.site.heads)
        ):
            key = key[:, ::group]  # the model repeated its key heads
        if rows is not None:
            padded = mask.lengths is not None and keys == call.queries
            mask = replace(mask, queries=mask.lengths) if padded else mask & rows[:, None, :, None]
        metrics = statistics(
            call.query, key, mask=mask, scale=call.scale, statistics=chosen, features=features
        )
    else:
        raise ValueError(f"{call.site.name}: a call with neither scores nor queries and keys")
    exact = metrics["entropy"].dtype
    normalised = metrics["entropy"] / metrics["keys"].clamp(min=2).log()
    metrics["entropy_normalised"] = normalised.masked_fill_(
        metrics["keys"] < 2, 0.0
    )  # not what rounding left
    metrics["output_norm"] = _norm(call.output, exact)
    if chosen == "full":
        metrics["effective_keys"] = 1 / metrics["collision"]
    absent = {"output_norm"} if call.partial else set()
    if call.modified:
        absent.add("largest_logit")  # the weights are no softmax of logits
    if not visibility.aligned:
        scrambled = call.blocked or call.partial or (call.site.displaced and not call.site.cross)
        absent |= OF_ONE_SEQUENCE | (OF_WHOLE_KEYS if scrambled else set())
    return {name: value for name, value in metrics.items() if name not in absent} if absent else metrics


def _scale_shares(metrics: dict[str, Tensor], scores: Tensor) -> None:
    """From the statistics of normalised weights to those of the weights that were used, which need not sum to
    one. Distances are means, and stay.
    """
    used = scores.exp()
    mass = used.sum(-1)
    metrics["entropy"] = mass * metrics["entropy"] - torch.special.xlogy(mass, mass)
    for name in ("self", "previous", "next", "first", "local", "confidence"):
        if name in metrics:
            metrics[name] = metrics[name] * mass
    if "collision" in metrics:
        metrics["collision"] = metrics["collision"] * mass**2
    if "features" in metrics:
        metrics["features"] = metrics["features"] * mass.unsqueeze(-1)
    if "received" in metrics:
        metrics["received"] = used.sum(2)


def _of_signed(call: Call, visibility: Visible) -> dict[str, Tensor]:
    """The metrics of weights that may be negative: their positions and sizes, but no entropy."""
    assert call.weights is not None
    weights = call.weights[..., : visibility.keys].to(torch.promote_types(call.output.dtype, torch.float32))
    metrics = {"keys": (weights != 0).sum(-1), "output_norm": _norm(call.output, weights.dtype)}
    if visibility.aligned:
        keys = torch.arange(visibility.keys, device=weights.device)
        position = torch.arange(call.queries, device=weights.device)[:, None] + visibility.offset
        steps = {"previous": -1, "self": 0, "next": 1}
        metrics |= {name: (weights * (keys == position + step)).sum(-1) for name, step in steps.items()}
        metrics["first"] = weights[..., 0]
    return metrics


def _norm(output: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of each head's output (batch, heads, queries, width), read in memory order."""
    by_query = output.stride(1) < output.stride(2)
    ordered = output.transpose(1, 2) if by_query else output
    norm: Tensor = torch.linalg.vector_norm(ordered, dim=-1, dtype=dtype)
    return norm.transpose(1, 2) if by_query else norm


def _with_sinks(metrics: dict[str, Tensor], scores: Tensor, sinks: Tensor) -> dict[str, Tensor]:
    """Statistics of a softmax over keys and sinks (batch, heads, queries, n), from those over the keys alone.

    A sink is a place to put attention, but has no position: it counts in entropy, confidence and effective
    keys, takes its share from every key, and leaves distances alone.
    """
    exact = metrics["entropy"].dtype
    sinks = sinks.to(exact)
    total = torch.logsumexp(torch.cat([metrics["logsumexp"].unsqueeze(-1), sinks], -1), -1)
    share = (metrics["logsumexp"] - total).exp()  # of the keys
    weights = (sinks - total.unsqueeze(-1)).exp()
    surprise = -torch.special.xlogy(weights, weights).sum(-1) - torch.special.xlogy(share, share)
    out = metrics | {"logsumexp": total, "entropy": share * metrics["entropy"] + surprise}
    more = (weights > 0).sum(-1)
    out["keys"] = torch.where(metrics["keys"] > 0, metrics["keys"] + more, metrics["keys"])
    for name in ("self", "previous", "next", "first", "local"):
        if name in metrics:
            out[name] = share * metrics[name]
    if "features" in metrics:
        out["features"] = share.unsqueeze(-1) * metrics["features"]
    if "largest_logit" in metrics:
        out["largest_logit"] = torch.maximum(metrics["largest_logit"], sinks.amax(-1))
    if "confidence" in metrics:
        out["confidence"] = torch.maximum(share * metrics["confidence"], weights.amax(-1))
        out["collision"] = share**2 * metrics["collision"] + (weights**2).sum(-1)
        p = (scores.to(exact) - total.unsqueeze(-1)).exp()
        out["received"] = p.nan_to_num_(0.0).sum(2)
    return out


class Tally:
    """Counts, sums and sums of squares of several metrics, in float64, for each head.

    >>> tally = Tally(["entropy"], heads=2)
    >>> tally.add({"entropy": torch.ones(1, 2, 3)}, torch.ones(1, 2, 3, dtype=torch.bool))
    >>> tally.sums["entropy"].tolist()  # count, sum and sum of squares of each head
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """

    def __init__(
        self, names: Sequence[str], heads: int, device: torch.device | str = "cpu", profiles: bool = False
    ) -> None:
        self.names = list(names)
        self.heads = heads
        device = torch.device(device)
        # Without float64 on the device, two float32 numbers stand for one: the host need not wait for it.
        self._paired = for_float64(device) != device and not profiles
        device = device if self._paired else for_float64(device)
        exact = torch.float32 if self._paired else torch.float64
        self._tokens = torch.zeros(2, heads, dtype=exact, device=device)  # the second: what rounding took
        self._sums = torch.zeros(2, 3, len(self.names), heads, dtype=exact, device=device)
        self.profiles: dict[str, Tensor] | None = {} if profiles else None

    def clear(self) -> None:
        """Begin anew."""
        self._tokens.zero_()
        self._sums.zero_()
        if self.profiles is not None:
            self.profiles.clear()

    @property
    def tokens(self) -> Tensor:
        """How many queries counted, (heads,)."""
        return self._tokens.cpu().double().sum(0)

    @property
    def sums(self) -> dict[str, Tensor]:
        """For each metric its count, sum and sum of squares (3, heads)."""
        sums = self._sums.cpu().double().sum(0)
        return {name: sums[:, i] for i, name in enumerate(self.names)}

    def _grow(self, totals: Tensor, more: Tensor) -> None:
        """Add to totals (2, ...), and what their rounding took to the second of them."""
        if not self._paired:
            totals[0] += more
            return
        before = totals[0].clone()
        totals[0] += more
        part = totals[0] - before
        totals[1] += (before - (totals[0] - part)) + (more - part)

    def add(
        self,
        values: dict[str, Tensor],
        counted: Tensor,
        fewer: dict[str, Tensor] | None = None,
        start: int = 0,
    ) -> None:
        """Add values (batch, heads, queries) where ``counted`` (a shape that broadcasts to theirs).

        ``fewer`` counts fewer queries for a metric, whose values must be zero at the others. ``start`` is the
        position of query 0, for the profiles. Metrics that are not among the values are left alone.
        """
        names = [name for name in self.names if name in values]
        # (metrics, batch, heads, queries)
        x = torch.stack([values[name] for name in names])
        x = x.to(self._sums.dtype) if self._paired else in_float64(x)
        counted = counted.to(x.device)
        if x.device.type != "cpu" or not bool(counted.all()):  # elsewhere, asking would make the host wait
            x.masked_fill_(~counted, 0.0)
        weights = {name: counted & narrower.to(x.device) for name, narrower in (fewer or {}).items()}
        tokens = counted.expand(x.shape[1:]).sum((0, 2))
        self._grow(self._tokens, tokens.to(x.dtype))
        counts = tokens.to(x.dtype).repeat(len(names), 1)
        for name, weight in weights.items():
            counts[names.index(name)] = weight.expand(x.shape[1:]).sum((0, 2))
        if self.profiles is not None:
            for name, profile in zip(names, x.sum(1), strict=True):
                self._lengthen(name, 0, weights.get(name, counted).expand(x.shape[1:]).sum(0), start)
                self._lengthen(name, 1, profile, start)
        sums = torch.stack((counts, x.sum((1, 3)), x.square_().sum((1, 3))))
        if len(names) < len(self.names):
            every = sums.new_zeros(3, len(self.names), self.heads)
            for i, name in enumerate(names):
                every[:, self.names.index(name)] = sums[:, i]
            sums = every
        self._grow(self._sums, sums)

    def received(self, weights: Tensor, real: Tensor) -> None:
        """Add the attention received by keys (batch, heads, keys), where ``real`` (batch, keys)."""
        if self.profiles is not None:
            weights = in_float64(weights)
            real_keys = real.to(weights.device).unsqueeze(1).expand(weights.shape)
            self._lengthen("received", 0, real_keys.sum(0), 0)
            self._lengthen("received", 1, torch.where(real_keys, weights, 0.0).sum(0), 0)

    def _lengthen(self, name: str, row: int, values: Tensor, start: int) -> None:
        """Add (heads, length) to a profile (2, heads, positions), making it longer when needed."""
        assert self.profiles is not None
        profile = self.profiles.get(name)
        end = start + values.shape[-1]
        if profile is None or profile.shape[-1] < end:
            longer = torch.zeros(2, self.heads, end, dtype=torch.float64, device=values.device)
            if profile is not None:
                longer[..., : profile.shape[-1]] = profile
            profile = self.profiles[name] = longer
        profile[row, :, start:end] += values
