"""Is what `watch` says about a model's heads true? Held against the model's own materialised weights.

The reference is what `bench.coverage_spy` writes down; what the heads do is computed from it in float64.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import manyheads as mh
from bench import recipes
from bench.coverage_spy import Spy, Weights, equal, is_attention, reference, tensors, within

OF_ONE_SEQUENCE = ("distance", "self", "previous", "next", "local")
OF_WHOLE_KEYS = ("first", "distance_spread")
METRICS = ("entropy", "effective_keys", "confidence", *OF_ONE_SEQUENCE, *OF_WHOLE_KEYS)
# What needs more than weights to be known: the scores, and what the heads made of the values.
SOMETIMES = ("entropy_normalised", "largest_logit", "output_norm")
TOLERANCE = 1e-3  # relative, and 1 at least: the reference is float32, too, and took another kernel
OTHER_WEIGHTS = "the model changes its weights"  # the reference has those of the softmax
DIFFERENT = 1e-2  # outputs this far apart, relative to the largest, are not the same function


@dataclass
class Verdict:
    """What came of watching one model."""

    sites: int = 0
    attention: bool = False
    verified: int = 0  # sites of which everything was proved
    right: bool = True
    named: bool = False  # something is not right, and was said not to be
    reasons: list[str] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)  # how the reference weights of the sites were had
    checked: dict[str, int] = field(default_factory=dict)  # at how many sites each metric was compared
    excused: list[str] = field(default_factory=list)  # softmaxes in modules named attention that are none
    worst: float = 0.0
    gap: float = 0.0  # between the outputs of the default implementation and the eager one

    def wrong(self, reason: str, named: bool = False) -> None:
        """Note that something is not right; ``named`` where `watch` itself says so."""
        self.right, self.named = self.right and named, self.named or named
        self.reasons.append(reason)


Forward = Callable[[nn.Module], Any]


def check(
    model: nn.Module, forward: Forward, eager: Callable[[nn.Module], Callable[[], None] | None]
) -> Verdict:
    """Watch ``forward(model)`` and hold what was seen against the model's own weights.

    ``forward`` must do the same each time; ``eager`` switches the model to the implementation that
    materialises its weights, and may return how to switch back: where both do not compute the same, the
    reference is the default implementation with the textbook in place of the fused kernel.
    """
    verdict = Verdict()
    with torch.no_grad():
        plain = _run(forward, model)
        with mh.watch(model, statistics="full") as seen:
            watched = _run(forward, model)
        if not _same(plain, watched):
            again = _run(forward, model)
            if _same(plain, again):
                verdict.wrong("the watched output is not the plain one to the bit")
            else:
                verdict.reasons.append("two plain runs differ")
        table = seen.table if seen.sites else None
        back = eager(model)
        spy, there = _spied(model, forward)
        verdict.gap = _gap(watched, there)
        if verdict.gap > DIFFERENT and back is not None:
            back()
            spy, there = _spied(model, forward)
            verdict.gap = _gap(watched, there)
            verdict.reasons.append("eager computes something else than the default implementation")
        _compare(verdict, seen, table, reference(spy))
    return verdict


def _spied(model: nn.Module, forward: Forward) -> tuple[Spy, list[Tensor]]:
    for _ in range(2):
        spy = Spy(model)
        try:
            with spy.watching():
                return spy, _run(forward, model)
        except Exception as error:  # some cannot return their weights
            if not getattr(getattr(model, "config", None), "output_attentions", False):
                raise RuntimeError(f"the reference does not run: {error}") from error
            model.config.output_attentions = False
    raise AssertionError


def _run(forward: Forward, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(7)
    return [tensor.clone() for tensor in tensors(forward(model)) if tensor.is_floating_point()]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(first, second, strict=True)
    )


def _gap(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference of the first output of both, relative to its size."""
    if not first or not second or first[0].shape != second[0].shape:
        return 0.0
    a, b = first[0].double().nan_to_num(), second[0].double().nan_to_num()
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) if a.numel() else 0.0


def _compare(verdict: Verdict, seen: Any, table: Any, found: list[Weights]) -> None:
    """Match the sites with the reference weights of their modules, in the order of the calls."""
    sites: dict[str, list[Any]] = {}
    for site in seen.sites:
        sites.setdefault(site.path, []).append(site)
    calls: dict[str, list[Weights]] = {path: [] for path in sites}
    lost: list[Weights] = []
    for call in found:
        owners = [path for path in sites if within(call.path, path)] or [
            path for path in sites if within(path, call.path)
        ]
        (calls[max(owners, key=len)] if owners else lost).append(call)
    verdict.sites = len(seen.sites)
    verdict.verified = sum(site.verified for site in seen.sites)
    for path, there in sites.items():
        for site in there:
            rows = [i for i, row in enumerate(table.rows) if row.site == site.name]
            ours = {name: table[name][rows] for name in ("tokens", *METRICS, *SOMETIMES)}
            best = _best(site, ours, calls[path])
            verdict.worst = max(verdict.worst, min(best.error, 9.0))
            if best.error <= TOLERANCE:
                for call in best.used:
                    call.claimed = True
                verdict.routes[best.used[0].how] = verdict.routes.get(best.used[0].how, 0) + 1
                for name in best.compared:
                    verdict.checked[name] = verdict.checked.get(name, 0) + 1
                expected = _kind(best.used)
                if expected is not None and (site.kind == "causal") != expected and site.kind != "cross":
                    verdict.wrong(f"{site.name}: kind {site.kind}, causal weights: {expected}")
            else:
                shapes = sorted({tuple(call.value.shape) for call in calls[path]})
                what = "no weights of its shape"
                if math.isfinite(best.error):
                    what = f"{best.metric} off by {best.error:.1e}"
                verdict.wrong(
                    f"{site.name} ({site.kind}, {site.heads} heads): {what}; the model's {shapes[:3]}",
                    named=not site.verified or any(note.startswith(OTHER_WEIGHTS) for note in site.notes),
                )
    unclaimed = [call for call in lost + [c for cs in calls.values() for c in cs] if not call.claimed]
    for call in unclaimed:
        if any(equal(call.value, other.value) for other in calls.get(call.path, ()) if other.claimed):
            continue  # the same weights once more, for other values
        table_like = call.value.shape[-2] > 1 or call.value.dim() > 3
        if call.how not in ("sdpa", "multi_head") and not (is_attention(call.kind) and table_like):
            continue
        why = "a linear map of one sequence" if call.mapped else recipes.NO_QUERIES_AND_KEYS.get(call.kind)
        if why:
            verdict.excused.append(f"{call.path} ({call.kind}): {why}")
        else:
            verdict.wrong(
                f"not seen: {call.how} {tuple(call.value.shape)} in {call.path} ({call.kind})",
                named=any(within(call.path, path) for path in seen.missed),
            )
    verdict.attention = bool(seen.sites) or not verdict.right or verdict.named
    for path, why in seen.missed.items():
        verdict.reasons.append(f"said to be missed: {path}: {why}")


@dataclass
class Match:
    """How far a site's numbers are from those of some reference calls, and by which metric."""

    error: float = math.inf
    metric: str = ""
    used: list[Weights] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)


def _best(site: Any, ours: dict[str, Tensor], calls: list[Weights]) -> Match:
    """The run of calls not yet claimed (mostly one call) that the site's numbers fit best."""
    best = Match()
    free = [call for call in calls if not call.claimed]
    for count in (1, *range(2, len(free) + 1)):
        for start in range(len(free) - count + 1):
            run = free[start : start + count]
            for fold, blocked in _foldings(run, site.heads):
                match = _match(site, ours, run, fold, blocked)
                if match.error < best.error:
                    best = match
                if best.error <= TOLERANCE:
                    return best
        if best.error < 0.3 and count == 1:  # nearly: pieces of one attention would be far off
            break
    for start in range(len(free) - site.heads + 1 if site.heads > 1 else 0):
        run = free[start : start + site.heads]
        if run[0].value.dim() == 3 and len({call.value.shape for call in run}) == 1:
            match = _match(site, ours, [_heads_in_turn(run)], lambda x: x, False)
            if match.error < best.error:
                best = replace(match, used=run)
    return best


def _heads_in_turn(run: list[Weights]) -> Weights:
    """The weights of a loop over heads, (batch, queries, keys) each, as those of one call."""

    def stacked(name: str) -> Tensor | None:
        parts = [getattr(call, name) for call in run]
        return None if any(part is None for part in parts) else torch.stack(parts, 1)

    names = ("value", "keys", "logit", "output")
    return replace(run[0], **{name: stacked(name) for name in names})


Fold = Callable[[Tensor], Tensor]  # (..., queries, n) to (batch, heads, queries, n)


def _foldings(run: list[Weights], heads: int) -> Iterator[tuple[Fold, bool]]:
    """Every way in which the leading axes of the weights may be batch and heads, and whether the batch then
    holds blocks of sequences.
    """
    shape = run[0].value.shape
    if any(call.value.dim() != len(shape) for call in run):
        return
    if len(shape) == 3:
        if all(call.value.shape[0] % heads == 0 for call in run):
            yield lambda x: x.unflatten(0, (-1, heads)), False
            if shape[0] > heads:
                yield lambda x: x.unflatten(0, (heads, -1)).transpose(0, 1), False
        if heads == 1:
            yield lambda x: x.unsqueeze(1), False
        return
    if len(shape) == 4 and shape[0] > heads and all(call.value.shape[0] % heads == 0 for call in run):
        yield lambda x: x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1), True  # blocks inside
    lead = len(shape) - 2
    for start in range(lead):  # a run of leading axes is the heads, the others are batch
        for end in range(start + 1, lead + 1):
            if math.prod(shape[start:end]) == heads:
                yield _moved(tuple(range(start, end)), lead, heads), lead - (end - start) > 1
    if len(shape) == 4 and shape[2] == heads:  # (batch, queries, heads, keys)
        yield lambda x: x.transpose(1, 2), False
    if heads == 1:
        yield lambda x: x.flatten(0, -3).unsqueeze(1), lead > 1


def _moved(axes: tuple[int, ...], lead: int, heads: int) -> Fold:
    last = tuple(range(lead - len(axes), lead))
    return lambda x: x.movedim(axes, last).reshape(-1, heads, *x.shape[-2:])


def _match(site: Any, ours: dict[str, Tensor], run: list[Weights], fold: Fold, blocked: bool) -> Match:
    """Compare our means with the reference's: differences relative where they are above one."""
    folded = [fold(call.value).double() for call in run]
    if any(part.dim() != 4 or part.shape[1] != site.heads for part in folded):
        return Match()
    absent = _absent(site, folded[0], blocked)
    best = Match()
    for own in (True, False) if blocked else (not absent,):  # where the own keys of a block are, nobody says
        sums: dict[str, Tensor] = {}
        for call, part in zip(run, folded, strict=True):
            counted = _counted(part, site.kind == "cross", own)
            for name, value in (summed(part, counted) | _beyond(call, part, counted, fold)).items():
                sums[name] = sums.get(name, 0.0) + value
        known = [name for name in SOMETIMES if all(_knows(call, name) for call in run)]
        match = Match(0.0, "tokens", run, [name for name in (*METRICS, *known) if name not in absent])
        errors = {"tokens": (ours["tokens"] - sums["tokens"]).abs() / sums["tokens"].clamp(min=1)}
        for name in match.compared:
            wanted = sums[name] / sums[f"{name} of" if f"{name} of" in sums else "tokens"]
            off = (ours[name] - wanted).abs() / wanted.abs().clamp(min=1.0)
            if name == "distance_spread":
                off = off / 10  # a square root: near zero, float32 leaves 5e-3 of a position
            errors[name] = torch.where(ours[name].isnan() & wanted.isnan(), 0.0, off)
        for name in absent:
            errors[name] = torch.where(ours[name].isnan(), 0.0, math.inf)
        match.metric = max(errors, key=lambda name: float(errors[name].nan_to_num(math.inf).max()))
        match.error = float(errors[match.metric].nan_to_num(math.inf).max())
        best = match if match.error <= best.error else best
    return best


def _absent(site: Any, p: Tensor, blocked: bool) -> set[str]:
    """What has no meaning, and must not be there, for weights (batch, heads, queries, keys)."""
    queries, keys = p.shape[2:]
    if site.kind == "cross":
        return set(OF_ONE_SEQUENCE)
    if queries == keys:
        return set()
    if site.key_margins is not None and site.key_margins[1] is None:  # class attention: some tokens read all
        return set(OF_ONE_SEQUENCE)
    if blocked:
        return {*OF_ONE_SEQUENCE, *OF_WHOLE_KEYS}
    reached = (
        int(p[:, :, -1].any(0).any(0).nonzero()[-1:].sum()) + 1
    )  # a longer cache is hidden from there on
    ahead = queries > keys or bool(p.triu(max(0, reached - queries) + 1).any())
    return set(OF_ONE_SEQUENCE) if ahead else set()


def _counted(p: Tensor, cross: bool, own: bool) -> Tensor:
    """Which queries count, (batch, heads, queries): those with keys, whose own key (the queries stand at the
    end of the keys) is somebody's.
    """
    queries, keys = p.shape[2:]
    counted = p.sum(-1) > 0
    if own and not cross and queries <= keys:
        counted = counted & (p > 0).any(2).any(1)[:, keys - queries :].unsqueeze(1)
    return counted


def _knows(call: Weights, name: str) -> bool:
    return {"entropy_normalised": call.keys, "largest_logit": call.logit, "output_norm": call.output}[
        name
    ] is not None


def _beyond(call: Weights, p: Tensor, counted: Tensor, fold: Fold) -> dict[str, Tensor]:
    """Sums of what the weights alone do not tell. A query with one key has no normalised entropy."""
    sums = {}
    if call.keys is not None:
        keys = fold(call.keys.unsqueeze(-1)).squeeze(-1)
        sink = (1 - p.sum(-1)).clamp(min=0.0)
        entropy = -torch.special.xlogy(p, p).sum(-1) - torch.special.xlogy(sink, sink)
        several = counted & (keys > 1)
        sums["entropy_normalised"] = (entropy / keys.clamp(min=2).log() * several).sum((0, 2))
        sums["entropy_normalised of"] = several.sum((0, 2)).double()
    if call.logit is not None:
        logit = fold(call.logit.double().unsqueeze(-1)).squeeze(-1)
        sums["largest_logit"] = torch.where(counted, logit, 0.0).sum((0, 2))
    if call.output is not None:
        sums["output_norm"] = (fold(call.output.double()).norm(dim=-1) * counted).sum((0, 2))
    return sums


def summed(p: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Sums over the queries that count, for each head, from weights (batch, heads, queries, keys) in float64.

    Rows that sum to less than one left the rest to a sink.
    """
    queries, keys = p.shape[2:]
    gaps = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)  # (queries, keys)
    share = p.sum(-1)
    sink = torch.where(share < 1 - 1e-4, 1 - share, 0.0)
    of_keys = p / share.clamp(min=1e-30).unsqueeze(-1)
    centre = (of_keys * torch.arange(keys)).sum(-1, keepdim=True)
    values = {
        "entropy": -torch.special.xlogy(p, p).sum(-1) - torch.special.xlogy(sink, sink),
        "effective_keys": 1 / (p.square().sum(-1) + sink.square()).clamp(min=1e-30),
        "confidence": torch.maximum(p.amax(-1), sink),
        "distance": (of_keys * gaps.abs()).sum(-1),
        "distance_spread": (of_keys * (torch.arange(keys) - centre).square()).sum(-1).sqrt(),
        "self": (p * (gaps == 0)).sum(-1),
        "previous": (p * (gaps == -1)).sum(-1),
        "next": (p * (gaps == 1)).sum(-1),
        "first": p[..., 0],
        "local": (p * (gaps.abs() <= 8)).sum(-1),
    }
    sums = {name: (value * counted).sum((0, 2)) for name, value in values.items()}
    return sums | {"tokens": counted.sum((0, 2)).double()}


def _kind(calls: list[Weights]) -> bool | None:
    """Whether the weights are causal; None where one query or one key cannot tell."""
    p = calls[0].value
    if p.shape[-2] < 2 or p.shape[-2] != p.shape[-1]:
        return None
    return not bool(p.triu(1).any())
