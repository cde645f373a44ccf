"""card: a model before and after, in a few numbers: quality, size, memory, speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.untouched import evaluating
from manyheads.heads.calls import Call
from manyheads.heads.importance.losses import causal, fitting, units
from manyheads.heads.importance.observe import moved, observed
from manyheads.heads.importance.outputs import difference, main_tensor, read
from manyheads.heads.intercept import Interceptor
from manyheads.heads.maps import run
from manyheads.heads.visible import told, visible
from manyheads.surgery.prune import few

Metric = Callable[[nn.Module], float]
_LONGEST = 128  # tokens of the sequences that are timed


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    heads: int
    quality: float
    parameters: int
    bytes: int  # of its weights on disk
    cache: int  # bytes of keys and values for each token that a causal model remembers
    seconds: dict[int, float]  # a forward pass, by batch


@dataclass(frozen=True)
class Card:
    """A model before and after.

    measure: what ``quality`` is: "cosine" with the uncut model's output, "perplexity", or the user's own.
    """

    measure: str
    before: Side
    after: Side

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """What a person reads: (what, before, after)."""
        a, b = self.before, self.after
        found = [
            ("heads", f"{a.heads:,}", f"{b.heads:,}"),
            (f"{self.measure} on held-out text", f"{a.quality:.4f}", f"{b.quality:.4f}"),
            ("parameters", f"{a.parameters:,}", f"{b.parameters:,} ({b.parameters / a.parameters - 1:+.1%})"),
            ("on disk, MB", f"{a.bytes / 1e6:.1f}", f"{b.bytes / 1e6:.1f}"),
        ]
        if a.cache:
            found.append(
                ("KV cache, bytes a token", f"{a.cache:,}", f"{b.cache:,} ({b.cache / a.cache - 1:+.1%})")
            )
        for batch, seconds in a.seconds.items():
            after = b.seconds[batch]
            found.append(
                (
                    f"batch {batch}, ms",
                    f"{seconds * 1e3:.1f}",
                    f"{after * 1e3:.1f} ({seconds / after:.2f}x as fast)",
                )
            )
        return found


def card(
    model: nn.Module,
    small: nn.Module,
    batches: Iterable[Any],
    *,
    metric: Metric | None = None,
    sizes: tuple[int, ...] = (1, 32),
    repeats: int = 7,
) -> Card:
    """Compare a cut model with the uncut one, on batches that neither refit nor recovery has seen.

    Parameters
    ----------
    model, small: the uncut and the cut model.
    batches: dicts, tuples or tensors.
    metric: quality by a function of the model; without it, perplexity for language models, and for all others
        the mean cosine of the output with the uncut model's.
    sizes: how many sequences are timed at once.
    repeats: how often; the two models take turns, and the median counts.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> found = card(model, model, [torch.randint(17, (3, 5))], sizes=(1,), repeats=1)
    >>> found.measure, found.after.heads, round(found.after.quality, 5)
    ('cosine', 4, 1.0)
    """
    place = device_of(model)
    own = list(moved(batches, place))
    with evaluating(model, small):
        if metric is not None:
            measure = getattr(metric, "__name__", "quality")
            qualities = [metric(each) for each in (model, small)]
        else:
            measure, *qualities = quality(model, small, own)
        times = latency(model, small, own[0], sizes, repeats)
        sides = []
        for each, value, seconds in zip((model, small), qualities, times, strict=True):
            heads, cache = _attention(each, few(own[0]))
            held = {id(x): x for x in (*each.parameters(), *each.buffers())}
            parameters = sum(p.numel() for p in each.parameters())
            size = sum(x.numel() * x.element_size() for x in held.values())
            sides.append(Side(heads, value, parameters, size, cache, seconds))
    return Card(measure, *sides)


def quality(model: nn.Module, small: nn.Module, batches: list[Any]) -> tuple[str, float, float]:
    """What is measured, and its value for the uncut and the cut model: perplexity or the mean cosine."""
    total, weight, language = torch.zeros(2, dtype=torch.float64), 0.0, None
    with torch.no_grad(), observed(model) as observer:
        for batch in batches:
            forward = observer.forward(batch)
            other = run(small, batch)
            if language is None:
                language = fitting(forward.result, model, observer.sites) is causal
            if language:
                pair = [units(causal, result, batch).double() for result in (forward.result, other)]
                count = _next_tokens(main_tensor(forward.result)[1], forward.real).to(pair[0])
            else:
                apart = difference(forward.output, read(other, small, forward.real))
                pair = [torch.ones_like(apart), 1 - apart]
                count = torch.ones_like(apart)
            total += torch.stack([(x * count).sum() for x in pair]).cpu()
            weight += count.sum().item()
    before, after = (total / weight).tolist()
    return ("perplexity", math.exp(before), math.exp(after)) if language else ("cosine", before, after)


def _next_tokens(logits: Tensor, real: Tensor | None) -> Tensor:
    """How many tokens of each sequence are predicted, by logits (batch, length, vocabulary)."""
    lengths = torch.full((logits.shape[0],), logits.shape[1]) if real is None else real.sum(1)
    return (lengths - 1).clamp(min=0)


def latency(
    model: nn.Module, small: nn.Module, batch: Any, sizes: Iterable[int], repeats: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of a forward pass of each model by the number of sequences; the models take turns."""
    found: tuple[dict[int, float], dict[int, float]] = {}, {}
    with torch.no_grad():
        for size in sizes:
            fed = _repeated(batch, size)
            times: tuple[list[float], list[float]] = [], []
            for turn in range(repeats + 1):
                for each, spent in zip((model, small), times, strict=True):
                    started = perf_counter()
                    run(each, fed)
                    if turn:  # the first warms up
                        spent.append(perf_counter() - started)
            for result, spent in zip(found, times, strict=True):
                result[size] = median(spent)
    return found


def _repeated(value: Any, size: int) -> Any:
    """A batch of so many copies of the first sequence, no longer than is timed."""
    if isinstance(value, Tensor):
        row = value[:1, :_LONGEST] if value.dim() == 2 else value[:1]
        return row.expand(size, *row.shape[1:]).contiguous()
    if isinstance(value, dict):
        return {name: _repeated(item, size) for name, item in value.items()}
    return tuple(_repeated(item, size) for item in value) if isinstance(value, tuple | list) else value


def _attention(model: nn.Module, batch: Any) -> tuple[int, int]:
    """How many heads a model has, and the bytes that its cache takes for each token."""
    widths: dict[str, int] = {}

    def see(call: Call) -> None:
        with torch._C.DisableTorchFunction():
            told(call, visible(call))
            key = 0 if call.key is None else call.key.shape[-1]
            widths[call.site.name] = (key + call.value.shape[-1]) * call.value.element_size()

    with torch.no_grad(), Interceptor(model, see) as interceptor:
        run(model, batch)
    sites = interceptor.sites.by_name.values()
    cache = sum(len(set(site.kv_heads)) * widths[site.name] for site in sites if site.kind == "causal")
    return sum(site.heads for site in sites), cache
