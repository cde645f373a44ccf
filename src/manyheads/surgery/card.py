"""card: a model before and after a cut, in a few numbers: quality, size, memory, speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.common.devices import batches_to_device, device_of
from manyheads.common.json_numbers import plain
from manyheads.common.labelled_batch import without_labels
from manyheads.common.language import words
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.common.types import Batch, Json
from manyheads.heads.observer import tensors
from manyheads.heads.unverified_sites import Doubts, doubts_of
from manyheads.surgery.decoding_speed import Decoding, cache_bytes, decoding_speed
from manyheads.surgery.head_prices import cache_prices
from manyheads.surgery.prune import first_sequences
from manyheads.surgery.quality import Compared, compare_quality

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
    key_heads: int = 0


@dataclass(frozen=True)
class Card:
    """A model before and after.

    measure: what ``quality`` is: "perplexity", "accuracy", "word error rate" or another one, as `Compared`
        has it, or the name of the user's metric.
    sequences: how many it was measured on.
    change: from before to after, with its 95% interval: a factor for perplexity, else a difference; None for
        the user's metric.
    timed: the length of the timed sequences.
    doubts: notes about the sites of the model before.
    decoding: tokens generated in a second, by batch and length of what was read before.
    """

    measure: str
    before: Side
    after: Side
    sequences: int
    change: dict[str, float] | None
    within_noise: bool | None
    timed: str
    doubts: Doubts
    decoding: list[Decoding] = field(default_factory=list)

    def as_json(self) -> dict[str, Json]:
        """Plain data; None for numbers that are not finite."""
        numbers: dict[str, Json] = plain(asdict(self))
        del numbers["doubts"]
        return numbers | self.doubts.as_json()  # type: ignore[return-value]

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of text for people: (what, before, after)."""
        a, b = self.before, self.after
        shared = [(words("key heads"), f"{a.key_heads:,}", f"{b.key_heads:,}")]
        quality = words(
            "{measure}, {count:,} held-out sequences", measure=words(self.measure), count=self.sequences
        )
        smaller = b.parameters / a.parameters - 1
        rows = [
            (words("heads"), f"{a.heads:,}", f"{b.heads:,}"),
            *(shared if (a.key_heads, b.key_heads) != (a.heads, b.heads) else []),
            (quality, _with_error(a), _with_error(b)),
            *self._change(),
            (words("parameters"), f"{a.parameters:,}", f"{b.parameters:,} ({smaller:+.1%})"),
            (words("on disk, MB"), f"{a.bytes / 1e6:.1f}", f"{b.bytes / 1e6:.1f}"),
        ]
        if a.cache:
            after = f"{b.cache:,} ({b.cache / a.cache - 1:+.1%})"
            rows.append((words("KV cache, bytes a token"), f"{a.cache:,}", after))
        for batch, seconds in a.seconds.items():
            what = words("batch {batch} x {length}, ms", batch=batch, length=words(self.timed))
            faster = words("{factor:.2f}x as fast", factor=seconds / b.seconds[batch])
            rows.append((what, f"{seconds * 1e3:.1f}", f"{b.seconds[batch] * 1e3:.1f} ({faster})"))
        return rows + [_speed(each) for each in self.decoding]

    def _change(self) -> list[tuple[str, str, str]]:
        if self.change is None:
            return []
        value, low, high = (self.change[name] for name in ("value", "low", "high"))
        form = "x {:.3f}" if self.measure == "perplexity" else "{:+.4f}"
        if math.isnan(low):
            alone = words("{change}, one sequence: no interval", change=form.format(value))
            return [(words("change"), "", alone)]
        verdict = words(": within noise") if self.within_noise else ""
        text = words(
            "{change} ({low} to {high})",
            change=form.format(value), low=form.format(low), high=form.format(high),
        )  # fmt: skip
        return [(words("change, 95% interval"), "", text + verdict)]


def _speed(one: Decoding) -> tuple[str, str, str]:
    what = words("batch {batch} after {length:,} tokens, tokens/s", batch=one.batch, length=one.length)
    if one.why_not:
        return what, words("not measured"), words(one.why_not)
    return what, f"{one.before:.1f}", f"{one.after:.1f} ({one.after / one.before:.2f}x)"


def _with_error(side: Side) -> str:
    return f"{side.quality:.4f}" + ("" if side.quality_se is None else f" ± {side.quality_se:.4f}")


def card(
    model: nn.Module,
    small: nn.Module,
    batches: Iterable[Batch],
    *,
    metric: Metric | None = None,
    sizes: tuple[int, ...] = (1, 32),
    repeats: int = 7,
    lengths: tuple[int, ...] = (),
) -> Card:
    """Compare a cut model with the uncut one: quality, size, memory and speed, before and after.

    Use batches that neither refit nor recovery has seen.

    Parameters
    ----------
    model, small: the uncut and the cut model.
    batches: dicts, tuples or tensors; ``labels`` in a dict are the right classes, for accuracy; with those of
        `labelled`, quality is the task's.
    metric: quality by a function of the model; without it, perplexity for models that predict next tokens,
        accuracy for classes with labels, agreement with the uncut model for classes without, and cosine to
        its output for embeddings.
    sizes: how many sequences are timed at once.
    repeats: how often each pass is timed; the two models take turns, and the median counts.
    lengths: how many tokens a model that generates has read when its tokens per second are measured; none by
        default.

    Returns
    -------
    A `Card`: ``before`` and ``after`` (heads, quality with its standard error, parameters, bytes, seconds),
    the ``change`` of quality with its 95% interval, and whether that is ``within_noise``. ``rows()`` is a
    table for people, ``as_json()`` plain data for machines.

    See Also
    --------
    prune: makes the smaller model.
    compare: which heads do something else.
    labelled: batches with labels.
    evaluate: the metrics of a task.

    References
    ----------
    Agresti, Coull, "Approximate is better than exact for interval estimation of binomial proportions" (1998).

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> both = card(model, model, [torch.randint(17, (3, 5))], sizes=(1,), repeats=1)
    >>> both.measure, both.after.heads, round(both.after.quality, 5)
    ('cosine', 4, 1.0)
    """
    device = device_of(model)
    held_out = list(batches_to_device(batches, device))
    with evaluating(model, small):
        judged: Compared | None = None
        qualities: list[tuple[float, float | None]]
        if metric is not None:
            measure = getattr(metric, "__name__", "quality")
            qualities = [(metric(each), None) for each in (model, small)]
        else:
            judged = compare_quality(model, small, held_out)
            measure = judged.measure
            qualities = [(one.value, plain(one.se)) for one in (judged.before, judged.after)]
        first = without_labels(held_out[0])
        times = latency(model, small, first, sizes, repeats)
        sides, doubts = [], []
        for each, (value, error), seconds in zip((model, small), qualities, times, strict=True):
            prices = cache_prices(each, first_sequences(first))
            sites, cache = list(prices), round(sum(price.whole for price in prices.values()))
            measured = cache_bytes(each) if cache else None
            cache = cache if measured is None else round(measured)
            doubts.append(doubts_of(sites))
            held = {id(x): x for x in (*each.parameters(), *each.buffers())}
            parameters = sum(p.numel() for p in each.parameters())
            size = sum(x.numel() * x.element_size() for x in held.values())
            heads, key_heads = (sum(map(count, sites)) for count in (_heads, _key_heads))
            sides.append(Side(heads, value, error, parameters, size, cache, seconds, key_heads))
        decoding = decoding_speed(model, small, sizes, lengths) if lengths else []
    change = None
    if judged is not None:
        change = {name: getattr(judged.change, name) for name in ("value", "low", "high")}
    return Card(
        measure,
        sides[0],
        sides[1],
        sum(_sequences(batch) for batch in held_out),
        change,
        None if judged is None else judged.change.within_noise,
        _length(_repeated(first, 1)),
        doubts[0],
        decoding,
    )


def _heads(site: Site) -> int:
    return site.heads


def _key_heads(site: Site) -> int:
    return len(set(site.kv_heads))


def latency(
    model: nn.Module, small: nn.Module, batch: Batch, sizes: Iterable[int], repeats: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of a forward pass of each model by the number of sequences; the models take turns."""
    medians: tuple[dict[int, float], dict[int, float]] = {}, {}
    with torch.no_grad():
        for size in sizes:
            repeated = _repeated(batch, size)
            times: tuple[list[float], list[float]] = [], []
            for turn in range(repeats + 1):
                for each, spent in zip((model, small), times, strict=True):
                    started = perf_counter()
                    run(each, repeated)
                    if turn:  # the first warms up
                        spent.append(perf_counter() - started)
            for result, spent in zip(medians, times, strict=True):
                result[size] = median(spent)
    return medians


def _repeated(batch: Batch, size: int) -> Batch:
    """A batch of ``size`` copies of the first sequence, cut to the length that is timed."""

    def copies(x: Tensor) -> Tensor:
        row = x[:1, :_LONGEST] if x.dim() == 2 else x[:1]
        return row.expand(size, *row.shape[1:]).contiguous()

    repeated: Batch = map_tensors(copies, batch)
    return repeated


def _sequences(batch: Batch) -> int:
    """How many sequences a batch has."""
    return len(next(iter(tensors(batch).values()), ()))


def _length(batch: Batch) -> str:
    """The length of its sequences as text: tokens, or the shape of anything else.

    >>> _length({"input_ids": torch.ones(1, 7)}), _length(torch.ones(1, 3, 8, 8))
    ('7 tokens', '(3, 8, 8)')
    """
    first = next(iter(tensors(batch).values()), torch.ones(1, 0))
    return f"{first.shape[1]:,} tokens" if first.dim() == 2 else f"{tuple(first.shape[1:])}"
