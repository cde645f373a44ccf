"""Heads to silence, by a rule or by a ranking."""

from __future__ import annotations

import torch

from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run
from manyheads.heads.diversity import diversity
from manyheads.heads.importance import importance
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import unverified_heads
from manyheads.heads.watch import watch
from manyheads.surgery.plan import plan
from manyheads.view.live.session import Live
from manyheads.view.terminal.summary import target_of

RULES = ("sinks", "twins")
RANKINGS = ("fisher", "elimination", "output-norm", "confidence", "random")
# The Jensen-Shannon distance under which two heads look at the same things.
TWINS = 0.25

Heads = dict[str, list[int]]


def heads(live: Live, rule: str | None, ranking: str | None, keep: float) -> Heads:
    """The heads that somebody wants: by a rule, or the least important ones by a ranking."""
    if (rule is None) == (ranking is None):
        raise ValueError("expected a rule or a ranking, one of them")
    if rule is not None:
        return by_rule(live, rule)
    assert ranking is not None
    return by_ranking(live, ranking, keep)


def by_ranking(live: Live, ranking: str, keep: float) -> Heads:
    """The heads that matter least, such that the share ``keep`` stays: a set that can be cut, by `plan`.

    Heads at sites that are not verified stay.
    """
    if ranking not in RANKINGS:
        raise ValueError(f"ranking: got {ranking!r}; expected one of {', '.join(RANKINGS)}")
    if keep == 1:
        return {}
    ranked = table(live, ranking)
    return dict(plan(ranked, keep, protect=unverified_heads(ranked)).heads)


def by_rule(live: Live, rule: str) -> Heads:
    """The heads that a rule names.

    ``sinks`` rest on the first token or on special tokens. Of ``twins``, pairs that look at the same things,
    it is the one that matters less. Heads at sites that are not verified are left out.
    """
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}; expected one of {', '.join(RULES)}")
    found = _sinks(live) if rule == "sinks" else _twins(live)
    return {site: numbers for site, numbers in found.items() if live.sites[site].verified}


def table(live: Live, name: str, progress: Progress = no_progress) -> HeadTable:
    """What was measured under this name: ``watch``, ``diversity`` or a ranking; measured now if it was not.

    ``progress`` is called after each batch.
    """
    if name in live.tables:
        return live.tables[name]
    if live.read is None:
        raise ValueError("images: this needs pictures to be measured on; start again with --images FOLDER")
    if name == "watch":
        with torch.no_grad(), watch(live.model, "full", tokens=live.read.groups) as seen:
            for number, batch in enumerate(live.batches, 1):
                run(live.model, batch)
                progress("watch", number, len(live.batches))
        found = seen.table
    elif name == "diversity":
        found = diversity(live.model, live.batches, measures=["attention"], progress=progress)
    else:
        found = importance(live.model, live.batches, name, progress=progress)
    live.tables[name] = found
    return found


def _sinks(live: Live) -> Heads:
    seen = table(live, "watch")
    shares = live.read.shares if live.read is not None else {}
    found: Heads = {}
    for row in seen:
        at = target_of(row, shares)
        if at is not None and at.column in ("first", "special"):
            found.setdefault(row["site"], []).append(row["head"])
    return found


def _twins(live: Live) -> Heads:
    judged, ranked = table(live, "diversity"), table(live, "fisher")
    matters = {
        (row.site, row.head): value
        for row, value in zip(ranked.rows, ranked["importance"].tolist(), strict=True)
    }
    js = judged.matrices["js"]
    pairs = sorted(
        (js[i, j].item(), i, j)
        for i in range(len(judged))
        for j in range(i)
        if js[i, j].item() < TWINS  # false for nan, heads that cannot be compared
    )
    gone: set[int] = set()
    for _, i, j in pairs:
        if not {i, j} & gone:
            gone.add(min(i, j, key=lambda one: matters[judged.rows[one].site, judged.rows[one].head]))
    found: Heads = {}
    for i in sorted(gone):
        found.setdefault(judged.rows[i].site, []).append(judged.rows[i].head)
    return found
