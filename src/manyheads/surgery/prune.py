"""prune: rank, plan, cut, refit, recover, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from torch import Tensor, nn

from manyheads.capture.site import Selection, Site, Unverified
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Heads
from manyheads.heads.importance import importance
from manyheads.heads.table import HeadTable
from manyheads.surgery.cut import cut
from manyheads.surgery.plan import Plan, Scope, plan
from manyheads.surgery.recover import recover as learn
from manyheads.surgery.refit import refit as fit


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    keep: float = 0.5,
    *,
    rounds: int = 1,
    refit: bool = True,
    recover: int = 0,
    method: str = "elimination",
    scope: Scope = "global",
    floor: int = 1,
    protect: Heads | None = None,
    using: Plan | None = None,
    unverified: Unverified = "refuse",
    state: str | PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> nn.Module:
    """A smaller copy of a model that keeps a share of its heads and stays as close to it as can be.

    Ranks the heads (`importance`), plans which go (`plan`), removes them
    (`cut`), gives the maps that are left new weights by least squares (`refit`), and trains for a while
    (`recover`).

    Parameters
    ----------
    model: any torch.nn.Module; it is left as it is.
    batches: dicts, tuples or tensors, as the model takes them: plain text, without labels. A few thousand
        sentences are enough for all but a long recovery.
    keep: the share of heads that stays, between 0 and 1.
    rounds: remove the heads in so many goes, and rank again, on what the refit made, before each.
    refit: whether to refit.
    recover: how many steps to train; 0 for none.
    method: how heads are ranked: a method of `importance`.
    scope, floor, protect: as for `plan`.
    using: a plan to follow, instead of ranking.
    unverified: ``"allow"`` to rank by silencing, and to cut, heads at sites of which nothing could be proved
        (`Site.verified`); the copy is held to the silenced model all the same.
    state: a file from which an interrupted recovery goes on; see `recover`.
    progress: called with the stage, "rank", "cut", "refit" or "recover", and how much of it is done.

    Returns
    -------
    The smaller model. ``original_heads`` says which heads it kept.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> _ = torch.manual_seed(0)
    >>> model = Encoder(d_model=12, heads=4, layers=2, vocabulary=17).eval()
    >>> small = prune(model, [torch.randint(17, (13, 11))], keep=0.75)
    >>> sum(len(kept) for kept in small.original_heads.values()) < 8
    True
    """
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}; expected at least 1")
    if using is not None and rounds > 1:
        raise ValueError(f"rounds: got {rounds} with a plan, which says at once what to remove; expected 1")
    own = list(batches)
    if not own:
        raise ValueError("batches: expected at least one, got none")
    example = None if hasattr(model, "config") else few(own[0])
    small: nn.Module = model

    def ranking(stage: str, done: float, total: float | None) -> None:
        progress("rank", done, total)

    for number in range(rounds):
        if using is not None:
            using.check(model)
            chosen = using
        else:
            table = importance(small, own, method, unverified=unverified, progress=ranking)
            total = len(table) / (1 - (1 - keep) * number / rounds)  # heads of the uncut model
            left = total * (1 - (1 - keep) * (number + 1) / rounds)
            kept = _still(table, protect) if protect else None
            share = keep if rounds == 1 else min(left / len(table), 1.0)
            chosen = plan(table, share, scope=scope, floor=floor, protect=kept)
        progress("cut", 0, 1)
        small = cut(small, chosen, example, unverified=unverified)
        progress("cut", 1, 1)
        if refit:
            fit(small, own, teacher=model, progress=progress)
    if recover:
        learn(small, own, teacher=model, steps=recover, state=state, progress=progress)
    return small


def few(batch: Any) -> Any:
    """The first two sequences of a batch: enough to see what a model does with it.

    >>> import torch
    >>> few({"input_ids": torch.ones(5, 3)})["input_ids"].shape
    torch.Size([2, 3])
    """
    if isinstance(batch, Tensor):
        return batch[:2]
    if isinstance(batch, Mapping):
        return {name: few(item) for name, item in batch.items()}
    return tuple(few(item) for item in batch) if isinstance(batch, tuple | list) else batch


def _still(table: HeadTable, protect: Heads) -> dict[str, list[int]]:
    """Heads named by their numbers in the uncut model, by those that they have in a cut one."""
    chosen = Selection(protect)
    by_site: dict[str, list[int]] = {}
    layers = {row.site: row.layer for row in table.rows}
    for row in table.rows:
        by_site.setdefault(row.site, []).append(row.original_head)
    found: dict[str, list[int]] = {}
    sites = [Site(name, layers[name], max(old) + 1, tuple(old)) for name, old in by_site.items()]
    for site in sites:
        named = chosen.at(site)
        found[site.name] = [new for new, old in enumerate(by_site[site.name]) if old in named]
    chosen.finish(sites)
    return {site: heads for site, heads in found.items() if heads}
