"""curve: how quality falls as heads go, for several rankings and the random control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyheads.common.devices import device_of
from manyheads.heads.importance.observe import moved
from manyheads.surgery.card import quality
from manyheads.surgery.cut import cut
from manyheads.surgery.plan import Scope, plan
from manyheads.surgery.prune import few, rank
from manyheads.surgery.refit import refit as fit

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
METHODS = ("elimination", "fisher", "random")


@dataclass(frozen=True)
class Curve:
    """Quality by the share of heads kept.

    measure: what quality is, "cosine" or "perplexity".
    uncut: the quality of the uncut model.
    lines: for each way, (share kept, quality) from most to fewest heads.
    """

    measure: str
    uncut: float
    lines: dict[str, list[tuple[float, float]]]


def curve(
    model: nn.Module,
    batches: Iterable[Any],
    held_out: Iterable[Any],
    *,
    methods: Sequence[str] = METHODS,
    shares: Sequence[float] = SHARES,
    refit: bool = True,
    scope: Scope = "global",
    step: Callable[[float], None] = lambda share: None,
) -> Curve:
    """Prune a model to several shares of its heads, ranked in several ways, and measure what is left.

    Parameters
    ----------
    model: any torch.nn.Module; it is left as it is.
    batches: to rank and refit on.
    held_out: to measure on.
    methods: rankings: ``"elimination"``, and methods of `importance`, among them ``"random"``, the control.
    shares: of heads that stay.
    refit: whether to measure each ranking after a refit, too.
    scope: as for `plan`.
    step: told the share that is done.

    Examples
    --------
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
    lines: dict[str, list[tuple[float, float]]] = {
        f"{method}, refitted" if again else method: [] for method, again in ways
    }
    done = 0
    measure, uncut = "", 0.0
    for method in methods:
        table = rank(model, own, method, lambda what, share: None)
        for share in sorted(shares, reverse=True):
            chosen = plan(table, share, scope=scope)
            small = cut(model, chosen, example)
            for name in [name for name in lines if name.partition(",")[0] == method]:
                if name != method:
                    fit(small, own, teacher=model)
                measure, uncut, value = quality(model, small, seen)
                lines[name].append((chosen.keep, value))
                done += 1
                step(done / (len(lines) * len(shares)))
    return Curve(measure, uncut, lines)
