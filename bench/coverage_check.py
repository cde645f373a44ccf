"""Is what `watch` says about a model's heads true? Held against the model's own materialised weights.

The reference shares no code with manyheads: the model runs again in eager mode, with the textbook formula in
place of torch's fused kernel, and every softmax it takes and every weight its modules return is written down.
What the heads do is then computed from those weights in float64.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import manyheads as mh
from bench import recipes

METRICS = (
    "entropy", "effective_keys", "confidence", "distance", "distance_spread", "self", "previous", "next",
    "first", "local",
)  # fmt: skip
OF_ONE_SEQUENCE = ("distance", "self", "previous", "next", "local")
TOLERANCE = 1e-3  # relative, and 1 at least: the reference is float32, too, and took another kernel
DIFFERENT = 1e-2  # outputs this far apart, relative to the largest, are not the same function
HIDING = -3e4  # a score below this is somebody's way of hiding a key
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


@dataclass(eq=False)
class Weights:
    """Attention weights that the model itself made: (..., queries, keys), and the module that was running."""

    path: str
    kind: str
    value: Tensor
    how: (
        str  # "returned" by a module, "softmax", "sdpa" (the textbook formula), "multi_head" (torch's module)
    )
    claimed: bool = False


@dataclass
class Verdict:
    """What came of watching one model."""

    sites: int = 0
    attention: bool = False
    right: bool = True
    reasons: list[str] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)  # how the reference weights of the sites were had
    worst: float = 0.0
    gap: float = 0.0  # between the outputs of the default implementation and the eager one

    def wrong(self, reason: str) -> None:
        self.right = False
        self.reasons.append(reason)


class Spy(TorchFunctionMode):
    """Writes down each softmax, and computes torch's fused attention by the textbook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stack: list[tuple[str, str]] = []
        self.seen: list[Weights] = []
        self.returned: list[Weights] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out, weights, scores = textbook(*args, **kwargs)
            self._note(weights, scores, "sdpa")
            return out
        if func is F.multi_head_attention_forward:
            return self._multi_head(inspect.signature(func).bind(*args, **kwargs))
        out = func(*args, **kwargs)
        if func in SOFTMAXES and out.dim() >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            scores = args[0] if args else kwargs["input"]
            self._note(out.movedim(dim, -1), scores.movedim(dim, -1), "softmax")
        return out

    def _multi_head(self, call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        """torch's own module, asked for the weights of each head whatever the caller wanted."""
        call.apply_defaults()
        wanted, averaged = call.arguments["need_weights"], call.arguments["average_attn_weights"]
        call.arguments.update(need_weights=True, average_attn_weights=False)
        out, weights = F.multi_head_attention_forward(*call.args, **call.kwargs)
        self._note(weights, weights, "multi_head")
        return out, (weights.mean(-3) if averaged else weights) if wanted else None

    def _note(self, weights: Tensor, scores: Tensor, how: str) -> None:
        if weights.shape[-1] > 1 or weights.dim() > 3:
            nothing = scores.amax(-1, keepdim=True) < HIDING  # a row of biases that hide every key is uniform
            weights = weights.masked_fill(nothing, 0.0)
            self.seen.append(
                Weights(*(self.stack[-1] if self.stack else ("", "")), weights.detach().clone(), how)
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator["Spy"]:
        """Follow which module runs."""
        handles = []
        for path, module in self.model.named_modules():
            name = (path, type(module).__name__)
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self:
                yield self
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for handle in handles:
                handle.remove()

    def _enter(self, name: tuple[str, str]) -> Callable[..., None]:
        return lambda *_: self.stack.append(name)

    def _leave(self, name: tuple[str, str]) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while self.stack and self.stack.pop() != name:
                pass
            if type(module).__module__.startswith("torch.nn.") and not isinstance(
                module, nn.MultiheadAttention
            ):
                return
            with torch._C.DisableTorchFunction():
                for tensor in tensors(output):
                    if not any(tensor is other.value for other in self.returned) and _look_like_weights(
                        tensor
                    ):
                        self.returned.append(Weights(*name, tensor.detach(), "returned"))

        return leave


def textbook(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """softmax(scale q k' + mask) v, the weights and the scores, as torch documents its fused kernel."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.float().softmax(-1).nan_to_num(0.0).to(value.dtype)
    return weights @ value, weights, scores


def _look_like_weights(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or not tensor.is_floating_point() or min(tensor.shape) == 0:
        return False
    sums = tensor.detach().float().sum(-1)
    return bool((tensor >= 0).all() and (sums < 1.001).all() and sums.mean() > 0.05)


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)


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
        spy, reference = _spied(model, forward)
        verdict.gap = _gap(watched, reference)
        if verdict.gap > DIFFERENT and back is not None:
            back()
            spy, reference = _spied(model, forward)
            verdict.gap = _gap(watched, reference)
            verdict.reasons.append("eager computes something else than the default implementation")
        _compare(verdict, seen, table, _reference(spy))
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


def _reference(spy: Spy) -> list[Weights]:
    """What the spy saw, each call once: weights that a module returned take the place of its softmax."""
    found = list(spy.seen)
    for mine in spy.returned:
        inside = [x for x in found if x.how != "returned" and _within(x.path, mine.path)]
        if any(x.how == "multi_head" for x in inside):
            continue  # which returns the mean of the heads
        same = [x for x in inside if _equal(x.value, mine.value)]
        if not same and any(x.how == "returned" and _equal(x.value, mine.value) for x in found):
            continue  # passed on by an outer module
        alike = [
            x for x in inside
            if x.value.shape[:-1].numel() == mine.value.shape[:-1].numel()
            and x.value.shape[-1] - mine.value.shape[-1] in (0, 1)
            and x.value.shape[-2] == mine.value.shape[-2]
        ]  # fmt: skip
        if same or alike:
            old = (same or alike)[0]
            old.how = "returned"
            if not same:
                empty = old.value.reshape(*mine.value.shape[:-1], -1).sum(-1, keepdim=True) == 0
                old.value = mine.value.masked_fill(empty, 0.0)
        elif _is_attention(mine.kind) and not any(_holds(x.value, mine.value) for x in found):
            found.append(mine)
    return found


def _is_attention(kind: str) -> bool:
    return "ttention" in kind or "ttn" in kind


def _within(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(f"{outer}.")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether these are the same weights, however folded; rows of nothing aside."""
    if a.shape[-1] != b.shape[-1] or a.numel() != b.numel():
        return False
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    both = (a.sum(-1) > 0) & (b.sum(-1) > 0)
    return torch.allclose(a[both], b[both], atol=1e-6)


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Whether the weights are these, or their first or last columns (two sequences in one softmax)."""
    keys = part.shape[-1]
    return keys <= whole.shape[-1] and (_equal(whole[..., :keys], part) or _equal(whole[..., -keys:], part))


def _compare(verdict: Verdict, seen: Any, table: Any, reference: list[Weights]) -> None:
    """Match the sites with the reference weights of their modules, in the order of the calls."""
    sites: dict[str, list[Any]] = {}
    for site in seen.sites:
        sites.setdefault(site.path, []).append(site)
    calls: dict[str, list[Weights]] = {path: [] for path in sites}
    lost: list[Weights] = []
    for call in reference:
        owners = [path for path in sites if _within(call.path, path)] or [
            path for path in sites if _within(path, call.path)
        ]
        (calls[max(owners, key=len)] if owners else lost).append(call)
    verdict.sites = len(seen.sites)
    for path, there in sites.items():
        for site in there:
            rows = [i for i, row in enumerate(table.rows) if row.site == site.name]
            ours = {name: table[name][rows] for name in ("tokens", *METRICS)}
            error, used = _best(site, ours, calls[path])
            verdict.worst = max(verdict.worst, min(error, 9.0))
            if error <= TOLERANCE:
                for call in used:
                    call.claimed = True
                verdict.routes[used[0].how] = verdict.routes.get(used[0].how, 0) + 1
                expected = _kind(used)
                if expected is not None and (site.kind == "causal") != expected and site.kind != "cross":
                    verdict.wrong(f"{site.name}: kind {site.kind}, causal weights: {expected}")
            else:
                shapes = sorted({tuple(call.value.shape) for call in calls[path]})
                what = f"off by {error:.1e}" if math.isfinite(error) else "no weights of its shape"
                verdict.wrong(
                    f"{site.name} ({site.kind}, {site.heads} heads): {what}; the model's {shapes[:3]}"
                )
    unclaimed = [call for call in lost + [c for cs in calls.values() for c in cs] if not call.claimed]
    for call in unclaimed:
        if any(_equal(call.value, other.value) for other in calls.get(call.path, ()) if other.claimed):
            continue  # the same weights once more, for other values
        table_like = call.value.shape[-2] > 1 or call.value.dim() > 3
        if any(re.search(name, call.kind) for name in recipes.NO_QUERIES_AND_KEYS):
            continue
        if call.how in ("sdpa", "multi_head") or (_is_attention(call.kind) and table_like):
            verdict.wrong(f"not seen: {call.how} {tuple(call.value.shape)} in {call.path} ({call.kind})")
    verdict.attention = bool(seen.sites) or not verdict.right
    for path, why in seen.missed.items():
        verdict.reasons.append(f"said to be missed: {path}: {why}")


def _best(site: Any, ours: dict[str, Tensor], calls: list[Weights]) -> tuple[float, list[Weights]]:
    """The smallest error of the site's numbers against a run of calls not yet claimed (mostly one call)."""
    best, used = math.inf, []
    free = [call for call in calls if not call.claimed]
    for count in (1, *range(2, len(free) + 1)):
        for start in range(len(free) - count + 1):
            run = free[start : start + count]
            for folded in _foldings(run, site.heads):
                error = _error(site, ours, folded)
                if error < best:
                    best, used = error, run
                if best <= TOLERANCE:
                    return best, used
        if best < 0.3 and count == 1:  # nearly: pieces of one attention would be far off
            break
    return best, used


def _foldings(run: list[Weights], heads: int) -> Iterator[list[Tensor]]:
    """The weights as (batch, heads, queries, keys), in every way that their leading axes allow."""
    first = run[0].value
    if first.dim() == 3:
        if all(call.value.dim() == 3 and call.value.shape[0] % heads == 0 for call in run):
            yield [call.value.unflatten(0, (-1, heads)) for call in run]
            if first.shape[0] % heads == 0 and first.shape[0] > heads:
                yield [call.value.unflatten(0, (heads, -1)).transpose(0, 1) for call in run]
        if heads == 1:
            yield [call.value.unsqueeze(1) for call in run]
        return
    if any(call.value.dim() != first.dim() for call in run):
        return
    lead = first.dim() - 2
    for start in range(lead):  # a run of leading axes is the heads, the others are batch
        for end in range(start + 1, lead + 1):
            if math.prod(first.shape[start:end]) == heads:
                axes = tuple(range(start, end))
                last = tuple(range(lead - len(axes), lead))
                yield [x.value.movedim(axes, last).reshape(-1, heads, *x.value.shape[-2:]) for x in run]
    if first.dim() == 4 and first.shape[2] == heads:  # (batch, queries, heads, keys)
        yield [x.value.transpose(1, 2) for x in run]
    if heads == 1:
        yield [x.value.flatten(0, -3).unsqueeze(1) for x in run]


def _error(site: Any, ours: dict[str, Tensor], weights: list[Tensor]) -> float:
    """The largest difference between our means and the reference's, relative where they are above one."""
    sums: dict[str, Tensor] = {}
    for part in weights:
        if part.dim() != 4 or part.shape[1] != site.heads:
            return math.inf
        for name, value in summed(part.double(), site.kind == "cross").items():
            sums[name] = sums.get(name, 0.0) + value
    worst = float(((ours["tokens"] - sums["tokens"]).abs() / sums["tokens"].clamp(min=1)).max())
    for name in METRICS:
        if site.kind == "cross" and name in OF_ONE_SEQUENCE:
            continue
        wanted = sums[name] / sums["tokens"]
        error = ((ours[name] - wanted).abs() / wanted.abs().clamp(min=1.0)).max()
        worst = max(worst, float(error.nan_to_num(math.inf)))
    return worst


def summed(p: Tensor, cross: bool) -> dict[str, Tensor]:
    """Sums over the queries that count, for each head, from weights (batch, heads, queries, keys) in float64.

    Rows that sum to less than one left the rest to a sink.
    """
    queries, keys = p.shape[2:]
    real = (p > 0).any(2).any(1)  # (batch, keys)
    counted = p.sum(-1) > 0
    place = torch.arange(queries) + (keys - queries)
    if not cross and queries <= keys:
        counted = counted & real[:, place].unsqueeze(1)
    gaps = torch.arange(keys) - place[:, None]  # (queries, keys)
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
