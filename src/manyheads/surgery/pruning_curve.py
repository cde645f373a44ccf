"""pruning_curve: quality against the share of heads kept, for several rankings and the random control."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from manyheads.capture.site import Unverified
from manyheads.common.devices import batches_to_device, device_of
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.heads.importance import importance
from manyheads.surgery.cut import cut
from manyheads.surgery.plan import Scope, plan
from manyheads.surgery.prune import first_sequences
from manyheads.surgery.quality import compare_quality
from manyheads.surgery.refit import refit as fit

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
METHODS = ("elimination", "fisher", "random")


@dataclass(frozen=True)
class PruningCurve:
    """Quality by the share of heads kept.

    measure: what quality is: as `Compared` has it, or the name of the user's metric.
    uncut: the quality of the uncut model, and its standard error over sequences (nan where it is unknown).
    lines: for each ranking, from most to fewest heads, (share kept, quality, standard error of its change
        from the uncut model's over the same sequences).
    sequences: how many it was measured on; 0 for the user's metric.
    """

    measure: str
    uncut: tuple[float, float]
    lines: dict[str, list[tuple[float, float, float]]]
    sequences: int


def pruning_curve(
    model: nn.Module,
    batches: Iterable[Batch],
    held_out: Iterable[Batch],
    *,
    methods: Sequence[str] = METHODS,
    shares: Sequence[float] = SHARES,
    refit: bool = True,
    scope: Scope = "global",
    metric: Callable[[nn.Module], float] | None = None,
    unverified: Unverified = "refuse",
    progress: Progress = no_progress,
) -> PruningCurve:
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
    metric: quality by a function of the model; without it, as `card` does.
    unverified: as for `prune`.
    progress: called with how many models are measured.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> texts = [torch.randint(17, (13, 5))]
    >>> measured = pruning_curve(model, texts, texts, methods=["random"], shares=[0.5], refit=False)
    >>> measured.measure, list(measured.lines), len(measured.lines["random"])
    ('cosine', ['random'], 1)
    """
    device = device_of(model)
    calibration, evaluation = (
        list(batches_to_device(batches, device)),
        list(batches_to_device(held_out, device)),
    )
    example = None if hasattr(model, "config") else first_sequences(calibration[0])
    variants = [
        (method, refitted) for method in methods for refitted in ((False, True) if refit else (False,))
    ]
    lines: dict[str, list[tuple[float, float, float]]] = {
        f"{method}, refitted" if refitted else method: [] for method, refitted in variants
    }
    done = 0
    judge = _judge_metric(metric) if metric is not None else _judge_quality
    measure, uncut, sequences = "", (0.0, math.nan), 0
    for method in methods:
        table = importance(model, calibration, method, unverified=unverified)
        names = [name for name in lines if name.partition(",")[0] == method]
        for share in sorted(shares, reverse=True):
            try:
                chosen = plan(table, share, scope=scope)
            except ValueError:  # a model of few heads has none to remove for a large share
                if share == min(shares):
                    raise
                done += len(names)
                continue
            small = cut(model, chosen, example, unverified=unverified)
            for name in names:
                if name != method:
                    fit(small, calibration, teacher=model)
                measure, uncut, value, sequences = judge(model, small, evaluation)
                lines[name].append((chosen.keep, *value))
                done += 1
                progress("curve", done, len(lines) * len(shares))
    return PruningCurve(measure, uncut, lines, sequences)


_Judged = tuple[str, tuple[float, float], tuple[float, float], int]


def _judge_quality(model: nn.Module, small: nn.Module, batches: list[Batch]) -> _Judged:
    quality = compare_quality(model, small, batches)
    before, after = (quality.before.value, quality.before.se), (quality.after.value, quality.change_se)
    return quality.measure, before, after, quality.sequences


def _judge_metric(
    metric: Callable[[nn.Module], float],
) -> Callable[[nn.Module, nn.Module, list[Batch]], _Judged]:
    """Judge by the user's function, which is called on the uncut model once."""
    name, uncut = getattr(metric, "__name__", "quality"), None

    def judge(model: nn.Module, small: nn.Module, batches: list[Batch]) -> _Judged:
        nonlocal uncut
        if uncut is None:
            uncut = metric(model), math.nan
        return name, uncut, (metric(small), math.nan), 0

    return judge
