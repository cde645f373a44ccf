"""curve: how quality falls as heads go, for several rankings and the random control."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyheads.capture.site import Unverified
from manyheads.common.devices import device_of
from manyheads.common.progress import Progress, no_progress
from manyheads.heads.importance import importance
from manyheads.heads.observer import moved
from manyheads.surgery.cut import cut
from manyheads.surgery.plan import Scope, plan
from manyheads.surgery.prune import few
from manyheads.surgery.quality import compare_quality
from manyheads.surgery.refit import refit as fit

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
METHODS = ("elimination", "fisher", "random")


@dataclass(frozen=True)
class Curve:
    """Quality by the share of heads kept.

    measure: what quality is: as `Compared` has it, or the name of the user's own.
    uncut: the quality of the uncut model, and its standard error over sequences (nan where it is unknown).
    lines: for each way from most to fewest heads, (share kept, quality, standard error of its change from the
        uncut model's over the same sequences).
    sequences: how many it was measured on; 0 where the user's own measure decides that.
    """

    measure: str
    uncut: tuple[float, float]
    lines: dict[str, list[tuple[float, float, float]]]
    sequences: int


def curve(
    model: nn.Module,
    batches: Iterable[Any],
    held_out: Iterable[Any],
    *,
    methods: Sequence[str] = METHODS,
    shares: Sequence[float] = SHARES,
    refit: bool = True,
    scope: Scope = "global",
    metric: Callable[[nn.Module], float] | None = None,
    unverified: Unverified = "refuse",
    progress: Progress = no_progress,
) -> Curve:
    """Prune a model to several shares of its heads, ranked in several ways, and measure what is left.

    Parameters
    ----------
    model: any torch.nn.Module; it is left as it is.
    batches: to rank and refit on.
    held_out: to measure on.
    methods: methods of `importance` to rank by, among them ``"random"``, the control.
    shares: of heads that stay.
    refit: whether to measure each ranking after a refit, too.
    scope: as for `plan`.
    metric: quality by a function of the model; without it, as `compare` does.
    unverified: as for `prune`.
    progress: called with how many models are measured.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> texts = [torch.randint(17, (13, 5))]
    >>> found = curve(model, texts, texts, methods=["random"], shares=[0.5], refit=False)
    >>> found.measure, list(found.lines), len(found.lines["random"])
    ('cosine', ['random'], 1)
    """
    place = device_of(model)
    own, seen = list(moved(batches, place)), list(moved(held_out, place))
    example = None if hasattr(model, "config") else few(own[0])
    ways = [(method, again) for method in methods for again in ((False, True) if refit else (False,))]
    lines: dict[str, list[tuple[float, float, float]]] = {
        f"{method}, refitted" if again else method: [] for method, again in ways
    }
    done = 0
    judge = _by(metric) if metric is not None else _compared
    measure, uncut, sequences = "", (0.0, math.nan), 0
    for method in methods:
        table = importance(model, own, method, unverified=unverified)
        for share in sorted(shares, reverse=True):
            chosen = plan(table, share, scope=scope)
            small = cut(model, chosen, example, unverified=unverified)
            for name in [name for name in lines if name.partition(",")[0] == method]:
                if name != method:
                    fit(small, own, teacher=model)
                measure, uncut, value, sequences = judge(model, small, seen)
                lines[name].append((chosen.keep, *value))
                done += 1
                progress("curve", done, len(lines) * len(shares))
    return Curve(measure, uncut, lines, sequences)


_Judged = tuple[str, tuple[float, float], tuple[float, float], int]


def _compared(model: nn.Module, small: nn.Module, batches: list[Any]) -> _Judged:
    found = compare_quality(model, small, batches)
    before, after = (found.before.value, found.before.se), (found.after.value, found.change_se)
    return found.measure, before, after, found.sequences


def _by(metric: Callable[[nn.Module], float]) -> Callable[[nn.Module, nn.Module, list[Any]], _Judged]:
    """By a person's own function, which is asked about the uncut model once."""
    name, uncut = getattr(metric, "__name__", "quality"), None

    def judged(model: nn.Module, small: nn.Module, batches: list[Any]) -> _Judged:
        nonlocal uncut
        if uncut is None:
            uncut = metric(model), math.nan
        return name, uncut, (metric(small), math.nan), 0

    return judged
