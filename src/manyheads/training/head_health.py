"""HeadHealth: watches the heads of any model in anybody's training, and says what they are tending to."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from manyheads.common.devices import device_of
from manyheads.common.json_numbers import plain
from manyheads.common.types import JsonObject
from manyheads.heads.table import HeadTable, Row
from manyheads.training import health_callbacks
from manyheads.training.head_alarms import LOOKS, Alarm, Alarms, History, Look, Trend, trends
from manyheads.training.head_monitor import MONITORED, HeadMonitor, structure
from manyheads.training.query_key_weights import LogitClip, SiteWeights, query_key_weights, spectral_norms

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from transformers import TrainerCallback

METRICS = ("entropy", "entropy_normalised", *MONITORED, "spectral_norm")
# What `summary` says of all heads together.
SUMMARY: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": torch.nanmean,
    "largest_logit": lambda x: x.nan_to_num(-torch.inf).amax(),
    "redundancy": torch.nanmean,
    "gradient_share": lambda x: x.nan_to_num(-torch.inf).amax(),
    "spectral_norm": lambda x: x.nan_to_num(-torch.inf).amax(),
    "dead": torch.nansum,
}
LOSSES = 100  # at most the losses of this many steps belong to one look
LOGGER = "manyheads.health"


class Clipped(NamedTuple):
    """A head whose weights were scaled: its logits are ``factor`` times what they were."""

    step: int
    site: str
    head: int
    largest_logit: float
    factor: float


class HeadHealth:
    """Watch the heads of a model while it is trained, in any loop.

    Every ``every`` steps it looks at each head during an ordinary step: ``entropy``, ``largest_logit`` (over
    all queries of the step), ``redundancy`` with its nearest ``twin`` (on 256 tokens), ``gradient_norm`` and
    ``gradient_share``, ``dead``, and ``spectral_norm`` of scale W_q' W_k. From the last looks it derives
    trends, and raises alarms in words. Unless ``clip`` acts, the run is the same to the bit: weights, losses,
    random numbers. All other steps only increment a counter.

    Parameters
    ----------
    model: any torch.nn.Module with attention; DistributedDataParallel's wrapper, too.
    every: steps between looks.
    clip: scale down the query and key weights of a head whose largest logit exceeds this, so that it does
        not; other heads stay as they are. None for never.
    clip_every: steps between the looks for that, which are cheaper.
    on_alarm: called with each `Alarm`. Default: a warning of the logger ``manyheads.health``.

    Attributes
    ----------
    alarms: all so far, each with step, site, layer, head, metric, value, trend and message.
    history: the looks, as a table of step, head and metric; ``history.to_pandas()``.
    clipped: what the clip did.

    Notes
    -----
    With several processes, only the first looks, at its own share of the batch; with ``clip`` all
    do, and agree on the largest. A step covers all forward passes between the two calls (gradient
    accumulation). Under mixed precision the numbers are computed in float32. Activation checkpointing is
    fine; where it is the re-entrant kind, the gradients of heads are not seen and are NaN. A compiled model
    runs uncompiled in the steps that are looked at, which may round differently. Sharded parameters (FSDP,
    tensor parallelism) are refused.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> health = HeadHealth(model, every=2)
    >>> for step in range(6):
    ...     health.before_step()
    ...     loss = model(torch.randint(101, (2, 7))).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     _ = health.after_step(loss)
    >>> health.history.steps, health.alarms
    ([2, 4, 6], [])
    >>> health.history["largest_logit"].shape                        # (looks, heads)
    torch.Size([3, 6])
    >>> health.trends("spectral_norm")[0].doubling > 0
    True

    See Also
    --------
    train : the built-in loop, whose ``watch_every`` uses it.
    watch : the heads of a model that is not being trained.
    diversity : how alike heads are, in full.

    References
    ----------
    Zhai et al. 2023, Stabilizing transformer training by preventing attention entropy collapse.
    Wortsman et al. 2023, Small-scale proxies for large-scale transformer training instabilities.
    Kimi Team 2025, Kimi K2: open agentic intelligence (QK-clip).
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        clip: float | None = None,
        clip_every: int = 10,
        on_alarm: Callable[[Alarm], object] | None = None,
    ) -> None:
        for name, value in (("every", every), ("clip_every", clip_every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a number of steps, 1 or more, got {value!r}")
        if clip is not None and not (math.isfinite(clip) and clip > 0):
            raise ValueError(f"clip: expected a largest logit above 0, or None, got {clip!r}")
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        self.model, self.every, self.clip, self.clip_every = model, every, clip, clip_every
        self.on_alarm = on_alarm or _warn
        self.alarms: list[Alarm] = []
        self.history = History()
        self.clipped: list[Clipped] = []
        self.step = 0
        self._table: HeadTable | None = None
        self._judge = Alarms()
        self._losses: deque[Tensor | float] = deque(maxlen=max(10, min(every, LOSSES)))
        self._monitor = HeadMonitor(model)
        self._weights: dict[str, SiteWeights] | None = None
        self._clip: LogitClip | None = None
        self._looking = self._pending = False  # hooks are on the model; a look waits to be evaluated
        _check_whole(model)

    def before_step(self, step: int | None = None) -> None:
        """Call this ahead of a step's first forward pass; ``step`` is its number, by default one more than
        the last.
        """
        self.step = self.step + 1 if step is None else step
        self._pending = False
        full = self.step % self.every == 0
        clips = self.clip is not None and self.step % self.clip_every == 0
        if (full and (is_main() or self.clip is not None)) or clips:
            self._open(full)

    def after_step(self, loss: Tensor | float | None = None) -> list[Alarm]:
        """Call this after the step's last backward pass, best after the optimiser's step: the clip changes
        weights. Returns the alarms that it raises.
        """
        if loss is not None:
            self.note_loss(loss)
        if not self._pending:
            return []
        self.close()
        self._pending = False
        monitor = self._monitor
        with torch.no_grad(), torch.autocast(device_of(self.model).type, enabled=False):
            if self._weights is None:
                self._weights = query_key_weights(monitor.forwards.values(), monitor.scales)
            monitor.forwards.clear()  # they hold the batch
            if self.clip is not None:
                self._scale_down()
            return [] if monitor.logits_only else self._look()

    def note_loss(self, loss: Tensor | float) -> None:
        """Record a loss for the alarms about it, where it comes separately from the step."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    @property
    def table(self) -> HeadTable | None:
        """The last look in full: what `watch` measures, and the metrics of the history."""
        return self._table

    def trends(self, metric: str) -> list[Trend | None]:
        """The trend of a metric for each head (of ``history.rows``); None before three looks.

        Slope per step, steps in which it doubles, and its value after as many steps as the last looks cover.
        """
        return trends(self.history, metric)

    def summary(self) -> dict[str, float]:
        """The last look in a few numbers for a tracker: means of entropy and redundancy, the largest of the
        others, and how many heads are dead.
        """
        if not self.history.looks:
            return {}
        values = self.history.looks[-1].values
        numbers = {f"heads/{name}": float(reduce(values[name])) for name, reduce in SUMMARY.items()}
        return {name: number for name, number in numbers.items() if math.isfinite(number)}

    def close(self) -> None:
        """Take the hooks of a look off the model, as `after_step` does, when an error ends a step."""
        if self._looking:
            self._looking = False
            self._monitor.__exit__(None, None, None)

    def trainer_callback(self) -> TrainerCallback:
        """This as a callback of transformers' Trainer: numbers go to its logs, alarms to `on_alarm`."""
        return health_callbacks.trainer_callback(self)

    def lightning_callback(self) -> Callback:
        """This as a callback of Lightning's Trainer: numbers go to its loggers, alarms to `on_alarm`."""
        return health_callbacks.lightning_callback(self)

    def state_dict(self) -> JsonObject:
        """What alarms to come depend on, as JSON: the last looks, losses and standing alarms."""
        looks = [asdict(look) for look in self.history.looks[-LOOKS:]]
        state = {
            "step": self.step,
            "looks": looks,
            "lowest_loss": list(self.history.lowest_loss),
            "standing": [[*about, ago] for about, ago in self._judge.standing.items()],
            "losses": [float(loss) for loss in self._losses],
        }
        return dict(plain(state))

    def load_state_dict(self, state: JsonObject) -> None:
        """Continue as the one whose `state_dict` this is; its older looks are not in it."""
        looks = []
        for look in state["looks"]:
            values = {name: torch.tensor(_numbers(column)) for name, column in look["values"].items()}
            rows, (loss, error) = [Row(*row) for row in look["rows"]], _numbers(look["loss"])
            looks.append(Look(look["step"], rows, values, (loss, error)))
        loss, error = state["lowest_loss"]
        self.step, self.history = state["step"], History(looks, (math.inf if loss is None else loss, error))
        self._judge.standing = {(metric, site): ago for metric, site, ago in state["standing"]}
        self._losses.clear()
        self._losses.extend(_numbers(state["losses"]))

    def _open(self, full: bool) -> None:
        self.close()
        if self._monitor.structure != structure(self.model):  # it was changed
            self._monitor, self._weights, self._clip = HeadMonitor(self.model), None, None
        self._monitor.logits_only = not (full and is_main())
        self._monitor.__enter__()
        self._looking = self._pending = True

    def _look(self) -> list[Alarm]:
        table = self._monitor.table
        norms = {site: spectral_norms(weights) for site, weights in (self._weights or {}).items()}
        column = torch.tensor(
            [float(norms[row.site][row.head]) if row.site in norms else math.nan for row in table.rows],
            dtype=torch.float64,
        )
        there = ~column.isnan()
        sums = torch.stack([there.double(), column.where(there, 0.0), column.where(there, 0.0).square()])
        self._table = replace(table, sums={**table.sums, "spectral_norm": sums})
        values = {name: self._table[name].float() for name in METRICS}
        self.history.add(Look(self.step, table.rows, values, _median(self._losses)))
        raised = self._judge.judge(self.history)
        self.alarms += raised
        for alarm in raised:
            self.on_alarm(alarm)
        return raised

    def _scale_down(self) -> None:
        """Scale the heads whose largest logit exceeds the clip, by as much as it takes."""
        assert self.clip is not None
        monitor, weights = self._monitor, self._weights or {}
        if self._clip is None:
            if missing := sorted(set(monitor.largest) - set(weights)):
                raise ValueError(f"clip: the weights behind {missing[0]} could not be found; leave clip out")
            self._clip = LogitClip(weights)
        for site, largest in sorted(monitor.largest.items()):
            if _processes() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX)
            bias = monitor.biases[site]
            for head, value in enumerate(largest.tolist()):
                if not value > self.clip:
                    continue
                if bias >= self.clip:
                    raise ValueError(
                        f"clip: a bias of {bias:.3g} is added to the logits of {site}, which no scaling "
                        f"brings under {self.clip:.3g}; expected a larger clip"
                    )
                # what is added stays: g q.k + b <= clip follows from q.k + b <= value and b <= bias
                factor = (self.clip - bias) / (value - bias)
                self._clip.scale(site, head, factor)
                self.clipped.append(Clipped(self.step, site, head, value, factor))


def _numbers(column: Sequence[float | None]) -> list[float]:
    return [math.nan if number is None else number for number in column]


def _median(losses: Sequence[Tensor | float]) -> tuple[float, float]:
    """The median of losses, and its standard error, from the median deviation."""
    if len(losses) < 4:
        return math.nan, math.nan
    x = torch.stack([torch.as_tensor(loss, dtype=torch.float64).cpu() for loss in losses])
    if not bool(x.isfinite().all()):
        return math.inf, 0.0
    spread = 1.48 * float((x - x.median()).abs().median())
    return float(x.median()), 1.25 * spread / len(x) ** 0.5


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the only process, or the first of several."""
    return _processes() == 1 or dist.get_rank() == 0


def _warn(alarm: Alarm) -> None:
    logging.getLogger(LOGGER).warning("%s", alarm)


def _check_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kind = type(parameter.data).__name__
        if kind == "DTensor" or "FlatParameter" in type(parameter).__name__:
            raise ValueError(
                f"model: {name} is sharded over processes ({kind}), so no process sees whole heads; expected "
                "a model that each process holds whole, as under DistributedDataParallel"
            )
