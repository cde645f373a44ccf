"""compare: a model before and after a cut, in a few numbers: quality, size, memory, speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible
from manyheads.capture.site import Site
from manyheads.common.devices import device_of
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.heads.observer import moved, tensors
from manyheads.heads.unverified_sites import Doubts, doubts_of
from manyheads.surgery.prune import few
from manyheads.surgery.quality import Compared, compare_quality, without_labels

Metric = Callable[[nn.Module], float]
_LONGEST = 128  # tokens of the sequences that are timed


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    heads: int
    quality: float
    quality_se: float | None  # its standard error over sequences; None where it is unknown
    parameters: int
    bytes: int  # of its weights on disk
    cache: int  # bytes of keys and values for each token that a causal model remembers
    seconds: dict[int, float]  # a forward pass, by batch


@dataclass(frozen=True)
class Card:
    """A model before and after.

    measure: what ``quality`` is: "perplexity", "accuracy", "agreement" or "cosine", as `Compared` has it, or
        the name of the user's own.
    sequences: how many it was measured on.
    change: from before to after, with its 95% interval: a factor for perplexity and else a difference; None
        for the user's own measure.
    timed: how long the sequences were whose passes were timed.
    doubts: what one should know of the sites of the model before.
    """

    measure: str
    before: Side
    after: Side
    sequences: int
    change: dict[str, float] | None
    within_noise: bool | None
    timed: str
    doubts: Doubts

    def as_json(self) -> dict[str, Any]:
        """Plain data; None for what is no number."""
        numbers: dict[str, Any] = finite(asdict(self))
        del numbers["doubts"]
        return numbers | self.doubts.as_json()

    def rows(self) -> list[tuple[str, str, str]]:
        """What a person reads: (what, before, after)."""
        a, b = self.before, self.after
        found = [
            ("heads", f"{a.heads:,}", f"{b.heads:,}"),
            (f"{self.measure}, {self.sequences:,} held-out sequences", _with_error(a), _with_error(b)),
            *self._change(),
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
                    f"batch {batch} x {self.timed}, ms",
                    f"{seconds * 1e3:.1f}",
                    f"{after * 1e3:.1f} ({seconds / after:.2f}x as fast)",
                )
            )
        return found

    def _change(self) -> list[tuple[str, str, str]]:
        if self.change is None:
            return []
        value, low, high = (self.change[name] for name in ("value", "low", "high"))
        form = "x {:.3f}" if self.measure == "perplexity" else "{:+.4f}"
        if math.isnan(low):
            return [("change", "", f"{form.format(value)}, one sequence: no interval")]
        verdict = ": within noise" if self.within_noise else ""
        said = f"{form.format(value)} ({form.format(low)} to {form.format(high)}){verdict}"
        return [("change, 95% interval", "", said)]


def _with_error(side: Side) -> str:
    return f"{side.quality:.4f}" + ("" if side.quality_se is None else f" ± {side.quality_se:.4f}")


def compare(
    model: nn.Module,
    small: nn.Module,
    batches: Iterable[Any],
    *,
    metric: Metric | None = None,
    sizes: tuple[int, ...] = (1, 32),
    repeats: int = 7,
) -> Card:
    """Compare a cut model with the uncut one: quality, size, memory and speed, before and after.

    Take batches that neither refit nor recovery has seen.

    Parameters
    ----------
    model, small: the uncut and the cut model.
    batches: dicts, tuples or tensors; ``labels`` in a dict are the right classes, for accuracy.
    metric: quality by a function of the model; without it, perplexity for models that predict next tokens,
        accuracy for classes with labels, agreement with the uncut model for classes without, and cosine to
        its output for embeddings.
    sizes: how many sequences are timed at once.
    repeats: how often each pass is timed; the two models take turns, and the median counts.

    Returns
    -------
    A `Card`: ``before`` and ``after`` (heads, quality with its standard error, parameters, bytes, seconds),
    the ``change`` of quality with its 95% interval, and whether that is ``within_noise``. ``rows()`` is a
    table for people, ``as_json()`` plain data for machines.

    See Also
    --------
    prune, refit, recover

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> card = compare(model, model, [torch.randint(17, (3, 5))], sizes=(1,), repeats=1)
    >>> card.measure, card.after.heads, round(card.after.quality, 5)
    ('cosine', 4, 1.0)
    """
    place = device_of(model)
    own = list(moved(batches, place))
    with evaluating(model, small):
        judged: Compared | None = None
        qualities: list[tuple[float, float | None]]
        if metric is not None:
            measure = getattr(metric, "__name__", "quality")
            qualities = [(metric(each), None) for each in (model, small)]
        else:
            judged = compare_quality(model, small, own)
            measure = judged.measure
            qualities = [(one.value, finite(one.se)) for one in (judged.before, judged.after)]
        first = without_labels(own[0])
        times = latency(model, small, first, sizes, repeats)
        sides, doubts = [], []
        for each, (value, error), seconds in zip((model, small), qualities, times, strict=True):
            sites, cache = _attention(each, few(first))
            doubts.append(doubts_of(sites))
            held = {id(x): x for x in (*each.parameters(), *each.buffers())}
            parameters = sum(p.numel() for p in each.parameters())
            size = sum(x.numel() * x.element_size() for x in held.values())
            sides.append(
                Side(sum(site.heads for site in sites), value, error, parameters, size, cache, seconds)
            )
    change = None
    if judged is not None:
        change = {name: getattr(judged.change, name) for name in ("value", "low", "high")}
    return Card(
        measure,
        sides[0],
        sides[1],
        sum(_sequences(batch) for batch in own),
        change,
        None if judged is None else judged.change.within_noise,
        _length(_repeated(first, 1)),
        doubts[0],
    )


def finite(value: Any) -> Any:
    """Plain data with None instead of what JSON does not know: nan and infinities.

    >>> finite({"a": [1.0, math.nan]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def _sequences(batch: Any) -> int:
    """How many sequences a batch has."""
    return len(next(iter(tensors(batch).values()), ()))


def _length(batch: Any) -> str:
    """How long its sequences are, in words: tokens, or the shape of anything else.

    >>> _length({"input_ids": torch.ones(1, 7)}), _length(torch.ones(1, 3, 8, 8))
    ('7 tokens', '(3, 8, 8)')
    """
    first = next(iter(tensors(batch).values()), torch.ones(1, 0))
    return f"{first.shape[1]:,} tokens" if first.dim() == 2 else f"{tuple(first.shape[1:])}"


def _attention(model: nn.Module, batch: Any) -> tuple[list[Site], int]:
    """Where a model has heads, and the bytes that its cache takes for each token."""
    widths: dict[str, int] = {}

    def see(call: Call) -> None:
        with torch._C.DisableTorchFunction():
            update_site(call, visible(call))
            key = 0 if call.key is None else call.key.shape[-1]
            widths[call.site.name] = (key + call.value.shape[-1]) * call.value.element_size()

    with torch.no_grad(), Interceptor(model, see) as interceptor:
        run(model, batch)
    sites = list(interceptor.sites.by_name.values())
    cache = sum(len(set(site.kv_heads)) * widths[site.name] for site in sites if site.kind == "causal")
    return sites, cache
