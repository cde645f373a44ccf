"""What heads are tending to, from the last looks at them, and alarms about it in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.common.types import JsonObject
from manyheads.heads.table import Row

if TYPE_CHECKING:
    import pandas

# Trends are those of the last LOOKS looks, and of no fewer than LEAST.
LOOKS, LEAST = 5, 3
# A largest logit is alarming from EXTREME on, where Kimi K2 (2025) clips, or from HIGH on if it tends to
# LARGE, and to GROWS times itself, within as many steps as the looks cover.
HIGH, LARGE, EXTREME, GROWS = 25.0, 60.0, 100.0, 1.5
# A head's normalised entropy below COLLAPSED is a collapse if its logits are HIGH and half of its layer's
# heads are above OPEN: a head that finds the one key it needs gets there with small logits.
COLLAPSED, OPEN = 0.02, 0.2
# Heads are twins from this linear CKA on; a layer of twins has more than this share of them.
ALIKE, MOST = 0.98, 0.75
# The gradient explodes when it is this many times its median of the last looks.
EXPLODES = 20.0
# The loss is rising when its median since the last look is ERRORS standard errors of the difference, and
# PERCENT percent, above the lowest median before.
ERRORS, PERCENT = 4.0, 3.0


@dataclass(frozen=True)
class Trend:
    """What a metric tends to, by a robust slope of the last looks (the median of the slopes of all pairs).

    slope: change per step.
    doubling: steps in which it doubles at the present pace; infinite when it does not grow.
    ahead: what it will be after as many steps as the looks cover.
    """

    slope: float
    doubling: float
    ahead: float


@dataclass(frozen=True)
class Alarm:
    """One alarm. ``layer`` and ``head`` are -1, and ``site`` is empty, where it is about the whole model;
    ``head`` alone is -1 where it is about a layer.
    """

    step: int
    site: str
    layer: int
    head: int
    metric: str
    value: float
    trend: Trend | None
    message: str

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.message}"


@dataclass
class Look:
    """What one look saw: a value (heads,) of each metric for each of the rows."""

    step: int
    rows: list[Row]
    values: dict[str, Tensor]
    loss: tuple[float, float] = (math.nan, math.nan)  # median since the look before, and its standard error


@dataclass
class History:
    """All looks, as a table of step, head and metric.

    Examples
    --------
    >>> rows = [Row("attn", 0, head, head, head, "causal") for head in range(2)]
    >>> history = History([Look(step, rows, {"entropy": torch.ones(2) * step}) for step in (10, 20)])
    >>> history.steps, history["entropy"]
    ([10, 20], tensor([[10., 10.],
            [20., 20.]]))
    >>> history.to_pandas().shape
    (4, 5)
    """

    looks: list[Look] = field(default_factory=list)
    lowest_loss: tuple[float, float] = (math.inf, 0.0)  # the lowest median of the looks but the last

    def add(self, look: Look) -> None:
        """One more look."""
        if self.looks and self.looks[-1].loss[0] < self.lowest_loss[0]:
            self.lowest_loss = self.looks[-1].loss
        self.looks.append(look)

    @property
    def steps(self) -> list[int]:
        """The steps that were looked at."""
        return [look.step for look in self.looks]

    @property
    def rows(self) -> list[Row]:
        """The heads at the last look."""
        return self.looks[-1].rows if self.looks else []

    @property
    def metrics(self) -> list[str]:
        """The names of the columns."""
        return list(dict.fromkeys(name for look in self.looks for name in look.values))

    def __len__(self) -> int:
        return len(self.looks)

    def __getitem__(self, metric: str) -> Tensor:
        """The values of a metric, (looks, heads), for the heads of the last look; NaN where not seen."""
        if metric not in self.metrics:
            raise KeyError(f"no metric {metric!r}; there are {', '.join(self.metrics) or 'none yet'}")
        heads = [(row.site, row.original_head) for row in self.rows]
        lines = []
        for look in self.looks:
            values = look.values.get(metric)
            if values is None:
                values = torch.full((len(look.rows),), torch.nan)
            if look.rows != self.rows:  # the model was changed meanwhile
                names = ((row.site, row.original_head) for row in look.rows)
                by_head = dict(zip(names, values.tolist(), strict=True))
                values = torch.tensor([by_head.get(head, math.nan) for head in heads])
            lines.append(values)
        return torch.stack(lines)

    def __iter__(self) -> Iterator[JsonObject]:
        """One row for each step and head."""
        for look in self.looks:
            columns = {name: values.tolist() for name, values in look.values.items()}
            for number, row in enumerate(look.rows):
                names = {"step": look.step, "site": row.site, "layer": row.layer, "head": row.head}
                yield names | {name: values[number] for name, values in columns.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each step and head."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame(list(self), columns=["step", "site", "layer", "head", *self.metrics])


def trends(history: History, metric: str) -> list[Trend | None]:
    """What a metric of each head tends to; None for heads that were seen too rarely.

    >>> rows = [Row("attn", 0, 0, 0, 0, "causal")]
    >>> values = {0: 1.0, 50: 2.0, 100: 4.0}
    >>> looks = [Look(step, rows, {"largest_logit": torch.tensor([x])}) for step, x in values.items()]
    >>> (trend,) = trends(History(looks), "largest_logit")
    >>> round(trend.doubling), round(trend.ahead)
    (50, 16)
    """
    recent = History(history.looks[-LOOKS:])
    steps = torch.tensor(recent.steps, dtype=torch.float64)
    return [_trend(steps, column) for column in recent[metric].double().T]


def _trend(steps: Tensor, values: Tensor) -> Trend | None:
    finite = values.isfinite()
    steps, values = steps[finite], values[finite]
    if len(values) < LEAST:
        return None
    slope, last, span = _slope(steps, values), float(values[-1]), float(steps[-1] - steps[0])
    if not bool((values > 0).all()):
        return Trend(slope, math.inf, last + slope * span)
    rate = _slope(steps, values.log())
    doubling = math.log(2) / rate if rate > 0 else math.inf
    return Trend(slope, doubling, last * math.exp(min(rate * span, 50.0)))


def _slope(steps: Tensor, values: Tensor) -> float:
    """The median of the slopes of all pairs (Theil 1950, Sen 1968)."""
    i, j = torch.triu_indices(len(steps), len(steps), 1)
    return float(((values[j] - values[i]) / (steps[j] - steps[i])).median())


class Alarms:
    """Judges the looks. An alarm is raised once, and again only after a rest of `LOOKS` looks without it."""

    def __init__(self) -> None:
        self.standing: dict[tuple[str, str], int] = {}  # metric and site: looks since it last held

    def judge(self, history: History) -> list[Alarm]:
        """The alarms that the last look raises."""
        self.standing = {about: looks + 1 for about, looks in self.standing.items() if looks < LOOKS}
        recent = History(history.looks[-LOOKS:], history.lowest_loss)
        raised = []
        for rule in RULES:
            for alarm in rule(recent):
                about = alarm.metric, alarm.site
                if about not in self.standing:
                    raised.append(alarm)
                self.standing[about] = 0
        return raised


def _large_logits(history: History) -> Iterator[Alarm]:
    """A largest logit that is extreme, or large and on its way there."""
    last, head_trends = history["largest_logit"][-1], trends(history, "largest_logit")
    for heads in _sites(history):
        alarm_heads = [
            head
            for head in heads
            if last[head] >= EXTREME or (last[head] >= HIGH and _grows(float(last[head]), head_trends[head]))
        ]
        if not alarm_heads:
            continue
        worst = max(alarm_heads, key=lambda head: float(last[head]))
        value, trend = float(last[worst]), head_trends[worst]
        pace = ""
        if trend is not None and math.isfinite(trend.doubling):
            pace = f" and doubling every {_rounded(trend.doubling)} steps"
        yield _alarm(
            history,
            worst,
            "largest_logit",
            trend,
            f"largest logit {value:.0f}{pace}{_others(alarm_heads)}; expect divergence; try qk_norm or a "
            "lower rate",
        )


def _collapsed_entropy(history: History) -> Iterator[Alarm]:
    """A head that came to look at one key only, while its peers did not."""
    last, logits = history["entropy_normalised"][-1], history["largest_logit"][-1]
    head_trends = trends(history, "entropy_normalised")
    for heads in _sites(history):
        is_open = last[heads].nanmedian() > OPEN
        alarm_heads = [h for h in heads if is_open and last[h] < COLLAPSED and logits[h] >= HIGH]
        if alarm_heads:
            worst = min(alarm_heads, key=lambda head: float(last[head]))
            yield _alarm(
                history,
                worst,
                "entropy_normalised",
                head_trends[worst],
                f"attention collapsed to single keys (entropy {float(last[worst]):.1%} of its largest) while "
                f"its peers' did not{_others(alarm_heads)}; try qk_norm or a lower rate",
            )


def _twins(history: History) -> Iterator[Alarm]:
    """A layer most of whose heads came to say the same as another; those of a new model often do at first."""
    redundancy, head_trends = history["redundancy"], trends(history, "redundancy")
    last = redundancy[-1]
    for heads in _sites(history):
        similar_heads, was_similar = (
            [head for head in heads if last[head] >= ALIKE],
            redundancy[:-1, heads] >= ALIKE,
        )
        is_new = bool((was_similar.sum(1) <= MOST * len(heads)).any())
        if is_new and len(heads) > 2 and len(similar_heads) > MOST * len(heads):
            worst = max(similar_heads, key=lambda head: float(last[head]))
            words = f"{len(similar_heads)} of {len(heads)} heads say the same as another (CKA from {ALIKE})"
            advice = "the layer needs fewer heads, or mh.diversity_terms"
            yield _alarm(
                history, worst, "redundancy", head_trends[worst], f"{words}; {advice}", of_layer=True
            )


def _dying(history: History) -> Iterator[Alarm]:
    """A layer in which more heads are dead than at the looks before."""
    dead = history["dead"]
    for heads in _sites(history):
        now, before = int(dead[-1, heads].nansum()), int(dead[0, heads].nansum())
        if len(dead) >= LEAST and now > before and now >= max(2, len(heads) / 4):
            words = f"{now} of {len(heads)} heads are dead, {before} were {len(dead) - 1} looks ago"
            advice = "they cost time and do nothing: cut them, or lower the rate"
            yield _alarm(
                history, heads[0], "dead", None, f"{words}; {advice}", of_layer=True, value=float(now)
            )


def _exploding_gradient(history: History) -> Iterator[Alarm]:
    """The gradient of all heads' outputs together, many times what it was."""
    norms = history["gradient_norm"].square().nansum(1).sqrt()
    before = norms[:-1].median() if len(norms) > LEAST else norms[:0].sum()
    if not bool(norms[-1].isfinite()) or (before > 0 and norms[-1] > EXPLODES * before):
        times = f"{float(norms[-1] / before):.0f} times its median before" if before > 0 else "not a number"
        message = f"the gradient at the heads is {times}; expect divergence; clip gradients or lower the rate"
        yield Alarm(history.steps[-1], "", -1, -1, "gradient_norm", float(norms[-1]), None, message)


def _rising_loss(history: History) -> Iterator[Alarm]:
    """The loss, clearly above its lowest so far."""
    value, error = history.looks[-1].loss
    lowest, its_error = history.lowest_loss
    least = max(ERRORS * math.hypot(error, its_error), abs(lowest) * PERCENT / 100)
    if math.isinf(value) or value - lowest > least:
        rose = f"{value:.3f}, up from {lowest:.3f}" if math.isfinite(value) else "not a number any more"
        message = f"the loss is {rose}; expect divergence; lower the rate, or go back to a checkpoint"
        yield Alarm(history.steps[-1], "", -1, -1, "loss", value, None, message)


RULES: tuple[Callable[[History], Iterator[Alarm]], ...] = (
    _large_logits, _collapsed_entropy, _twins, _dying, _exploding_gradient, _rising_loss,
)  # fmt: skip


def _sites(history: History) -> list[list[int]]:
    """The rows of each site."""
    sites: dict[str, list[int]] = {}
    for number, row in enumerate(history.rows):
        sites.setdefault(row.site, []).append(number)
    return list(sites.values())


def _alarm(
    history: History,
    number: int,
    metric: str,
    trend: Trend | None,
    words: str,
    *,
    of_layer: bool = False,
    value: float | None = None,
) -> Alarm:
    row = history.rows[number]
    head = -1 if of_layer else row.head
    ambiguous = len({r.site for r in history.rows if r.layer == row.layer}) > 1
    where = f"{row.site}" if ambiguous else f"layer {row.layer}"
    where += "" if of_layer else f" head {row.head}"
    value = float(history[metric][-1, number]) if value is None else value
    return Alarm(history.steps[-1], row.site, row.layer, head, metric, value, trend, f"{where}: {words}")


def _grows(logit: float, trend: Trend | None) -> bool:
    return trend is not None and trend.ahead >= max(LARGE, GROWS * logit)


def _others(alarm_heads: Sequence[int]) -> str:
    more = len(alarm_heads) - 1
    return f" (and {more} more head{'s' * (more > 1)} of the layer)" if more else ""


def _rounded(steps: float) -> str:
    return f"{steps:,.0f}" if steps < 100 else f"{float(f'{steps:.2g}'):,.0f}"
