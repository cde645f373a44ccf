"""Heads to silence, by a rule or by a ranking."""

from __future__ import annotations

from manyheads.common.progress import Progress, no_progress
from manyheads.heads.effects import page_measurements
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import unverified_heads
from manyheads.surgery.plan import plan
from manyheads.view.live.contract import SiteHeads
from manyheads.view.live.session import Live, required_corpus
from manyheads.view.terminal.summary import target_of

RULES = ("sinks", "twins")
RANKINGS = ("fisher", "elimination", "output-norm", "confidence", "random")
# Two heads with a smaller Jensen-Shannon distance than this attend alike.
TWINS = 0.25


def selected_heads(live: Live, rule: str | None, ranking: str | None, keep: float) -> SiteHeads:
    """The heads that a rule names, or the least important ones by a ranking."""
    if (rule is None) == (ranking is None):
        raise ValueError("expected either a rule or a ranking")
    if rule is not None:
        return by_rule(live, rule)
    assert ranking is not None
    return by_ranking(live, ranking, keep)


def by_ranking(live: Live, ranking: str, keep: float) -> SiteHeads:
    """The least important heads, such that the share ``keep`` stays: a set that can be cut, by `plan`.

    Heads at sites that are not verified stay.
    """
    if ranking not in RANKINGS:
        raise ValueError(f"ranking: got {ranking!r}; expected one of {', '.join(RANKINGS)}")
    if keep == 1:
        return {}
    ranked = measured_table(live, ranking)
    return dict(plan(ranked, keep, protect=unverified_heads(ranked)).heads)


def by_rule(live: Live, rule: str) -> SiteHeads:
    """The heads that a rule names.

    ``sinks`` give most of their attention to the first token or to special tokens. ``twins`` are pairs that
    attend alike: of each pair, the less important head is named. Heads at sites that are not verified are
    left out.
    """
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}; expected one of {', '.join(RULES)}")
    named = _sinks(live) if rule == "sinks" else _twins(live)
    return {site: numbers for site, numbers in named.items() if live.sites[site].verified}


def measured_table(live: Live, name: str, progress: Progress = no_progress) -> HeadTable:
    """The table of this name: ``watch``, ``diversity`` or a ranking; measured now if it was not before.

    ``progress`` is called after each batch.
    """
    if name in live.tables:
        return live.tables[name]
    read = required_corpus(live)
    if name == "watch":
        table = page_measurements.counted_table(live.model, live.batches, read.groups, progress)
    elif name == "diversity":
        table = page_measurements.redundancy(live.model, live.batches, outputs=False, progress=progress)
    else:
        table = page_measurements.ranking(live.model, live.batches, name, progress)
    live.tables[name] = table
    return table


def _sinks(live: Live) -> SiteHeads:
    shares = live.read.shares if live.read is not None else {}
    heads: SiteHeads = {}
    for row in measured_table(live, "watch"):
        at = target_of(row, shares)
        if at is not None and at.column in ("first", "special"):
            heads.setdefault(row["site"], []).append(row["head"])
    return heads


def _twins(live: Live) -> SiteHeads:
    judged, ranked = measured_table(live, "diversity"), measured_table(live, "fisher")
    importance_of = {
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
    named: set[int] = set()
    for _, i, j in pairs:
        if not {i, j} & named:
            named.add(min(i, j, key=lambda one: importance_of[judged.rows[one].site, judged.rows[one].head]))
    heads: SiteHeads = {}
    for i in sorted(named):
        heads.setdefault(judged.rows[i].site, []).append(judged.rows[i].head)
    return heads
