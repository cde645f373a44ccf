"""prune: rank, plan, cut, refit, recover, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike

from torch import nn

from manyheads.capture.site import Selection, Site, Unverified
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch, Heads
from manyheads.heads.importance import importance
from manyheads.heads.measurements.ranked_together import ranked_together
from manyheads.heads.table import HeadTable
from manyheads.surgery.cut import cut
from manyheads.surgery.head_prices import head_prices
from manyheads.surgery.plan import Plan, Scope, plan
from manyheads.surgery.prices import check_save
from manyheads.surgery.recover import recover as learn
from manyheads.surgery.refit import batches_to_fit
from manyheads.surgery.refit import refit as fit


def prune(
    model: nn.Module,
    batches: Iterable[Batch],
    keep: float | None = None,
    *,
    save: Mapping[str, float] | None = None,
    rounds: int = 1,
    refit: bool = True,
    recover: int = 0,
    method: str = "elimination",
    scope: Scope = "global",
    floor: int = 1,
    protect: Heads | None = None,
    groups: bool = False,
    using: Plan | None = None,
    calibration: Iterable[Batch] | None = None,
    unverified: Unverified = "refuse",
    state: str | PathLike[str] | None = None,
    memory: str | int | None = None,
    together: bool = False,
    progress: Progress = no_progress,
) -> nn.Module:
    """A smaller copy of a model that keeps a share of its heads, and stays as close to it as possible.

    Ranks the heads (`importance`), plans which to remove (`plan`), removes them (`cut`), fits the remaining
    linear layers by least squares (`refit`), and trains for some steps (`recover`).

    Parameters
    ----------
    model: any torch.nn.Module; it is left as it is.
    batches: dicts, tuples or tensors, as the model takes them: plain text, without labels. A few thousand
        sentences are enough for all but a long recovery.
    keep: the share of heads that stays, between 0 and 1; 0.5 unless ``save`` says what to reach.
    save: ``{"cache": share}``, ``{"parameters": share}`` or ``{"latency": share}`` to save instead, as for
        `plan`; heads are priced by `head_prices` first, and time is that of the first batch.
    rounds: remove the heads in this many rounds; heads are ranked again, after the refit, before each.
    refit: whether to refit.
    recover: the number of training steps; 0 for none.
    method: how heads are ranked: a method of `importance`.
    scope, floor, protect, groups: as for `plan`.
    using: a plan to follow, instead of ranking.
    calibration: batches to rank and refit on, where those are fewer than the recovery reads: a refit keeps
        one layer of what it reads in memory. All ``batches`` by default.
    unverified: ``"allow"`` to silence and cut heads at unverified sites, too (`Site.verified`); the copy is
        still checked against the silenced model.
    state: a file from which an interrupted recovery resumes; see `recover`.
    memory: what ``elimination`` and the refit may take, in bytes or as ``"2GB"``; half of what is free by
        default.
    together: the processes of torchrun share the batches of ranking and refit. Each of them calls this with
        the same model and batches, and gets the same smaller model. Not with ``recover``.
    progress: called with the stage, "rank", "cut", "refit" or "recover", and how much of it is done.

    Returns
    -------
    The smaller model. ``original_heads`` lists the heads that it kept.

    See Also
    --------
    importance, plan, cut, refit, recover: its steps.
    merge: fewer key heads instead.
    card: before and after.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Kwon, Kim, Mahoney, Hassoun, Keutzer, Gholami, "A fast post-training pruning framework for
    transformers" (2022).

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
    if together and recover:
        raise ValueError("recover: it learns in one process; expected 0 steps with together=True (torchrun)")
    if using is not None and rounds > 1:
        raise ValueError(f"rounds: got {rounds} with a plan, which says at once what to remove; expected 1")
    if save is not None:
        check_save(save)
        if keep is not None or using is not None or rounds > 1:
            raise ValueError("save: got save with keep, a plan or several rounds; expected save alone")
    keep = 0.5 if keep is None else keep
    every, fitted = batches_to_fit(model, batches, calibration, refit)
    example = None if hasattr(model, "config") else first_sequences(fitted[0])
    small: nn.Module = model

    def ranking(stage: str, done: float, total: float | None) -> None:
        progress("rank", done, total)

    for number in range(rounds):
        if using is not None:
            using.check(model)
            chosen = using
        else:
            rank_heads = ranked_together if together else importance
            table = rank_heads(small, fitted, method, unverified=unverified, memory=memory, progress=ranking)
            total = len(table) / (1 - (1 - keep) * number / rounds)  # heads of the uncut model
            left = total * (1 - (1 - keep) * (number + 1) / rounds)
            protected = _renumbered(table, protect) if protect else None
            share = keep if rounds == 1 else min(left / len(table), 1.0)
            if save is None:
                chosen = plan(table, share, scope=scope, floor=floor, protect=protected, groups=groups)
            else:
                prices = head_prices(small, first_sequences(fitted[0]), latency="latency" in save)
                chosen = plan(table, save=save, prices=prices, floor=floor, protect=protected)
        progress("cut", 0, 1)
        small = cut(small, chosen, example, unverified=unverified)
        progress("cut", 1, 1)
        if refit:
            fit(small, fitted, teacher=model, memory=memory, together=together, progress=progress)
    if recover:
        learn(small, every, teacher=model, steps=recover, state=state, progress=progress)
    return small


def first_sequences(batch: Batch) -> Batch:
    """The first two sequences of a batch, as an example input.

    >>> import torch
    >>> first_sequences({"input_ids": torch.ones(5, 3)})["input_ids"].shape
    torch.Size([2, 3])
    """
    first: Batch = map_tensors(lambda x: x[:2], batch)
    return first


def _renumbered(table: HeadTable, protect: Heads) -> dict[str, list[int]]:
    """Heads of the uncut model, by the numbers that they have in a cut one."""
    chosen = Selection(protect)
    by_site: dict[str, list[int]] = {}
    layers = {row.site: row.layer for row in table.rows}
    for row in table.rows:
        by_site.setdefault(row.site, []).append(row.original_head)
    renumbered: dict[str, list[int]] = {}
    sites = [Site(name, layers[name], max(old) + 1, tuple(old)) for name, old in by_site.items()]
    for site in sites:
        named = chosen.at(site)
        renumbered[site.name] = [new for new, old in enumerate(by_site[site.name]) if old in named]
    chosen.finish(sites)
    return {site: heads for site, heads in renumbered.items() if heads}
