"""Doubts about the sites of a model: which are not verified and why, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from manyheads.capture.site import Site
from manyheads.heads.table import HeadTable

# Sites named in a sentence.
NAMED = 3
_NO = "no: "


@dataclass(frozen=True)
class Doubts:
    """The sites that are not verified with the reasons, and the notes of sites, both by site.

    >>> doubts = Doubts({"h.0": "it was not seen"}, {f"h.{n}": "rows do not sum to one" for n in range(5)})
    >>> for sentence in doubts.sentences():
    ...     print(sentence)
    not verified, h.0: it was not seen
    5 sites (h.0, h.1, h.2, ...): rows do not sum to one
    """

    unverified: Mapping[str, str]
    notes: Mapping[str, str]

    def sentences(self) -> list[str]:
        """One for each reason and each note, with the sites."""
        reasons = [f"not verified, {sites}: {why}" for why, sites in _by_text(self.unverified).items()]
        return reasons + [f"{sites}: {note}" for note, sites in _by_text(self.notes).items()]

    def as_json(self) -> dict[str, dict[str, str]]:
        """The same two keys in the JSON of every verb."""
        return {"unverified": dict(self.unverified), "site_notes": dict(self.notes)}


def doubts_in(table: HeadTable) -> Doubts:
    """What a table says of its sites, in the columns ``verified`` and ``notes``."""
    verified = zip(table["site"], table.labels.get("verified", ()), strict=False)
    notes = zip(table["site"], table.labels.get("notes", ()), strict=False)
    return Doubts(
        {site: word.removeprefix(_NO) for site, word in verified if word.startswith(_NO)},
        {site: note for site, note in notes if note},
    )


def unverified_heads(table: HeadTable) -> dict[str, list[int]]:
    """The heads of sites that are not verified, ``{site: [head numbers]}``: those that nothing should change.

    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("attn", 0, head, head, head, "self") for head in range(2)]
    >>> unverified_heads(HeadTable(rows, torch.ones(2), {}, labels={"verified": ["no: it was not seen"] * 2}))
    {'attn': [0, 1]}
    """
    heads: dict[str, list[int]] = {site: [] for site in doubts_in(table).unverified}
    for row in table.rows:
        if row.site in heads:
            heads[row.site].append(row.head)
    return heads


def doubts_of(sites: Iterable[Site]) -> Doubts:
    """The doubts about some sites.

    >>> doubts_of([Site("attn", layer=0, heads=2, kv_heads=(0, 1), reason="nothing was proved")]).unverified
    {'attn': 'nothing was proved'}
    """
    sites = list(sites)
    return Doubts(
        {site.name: site.reason for site in sites if not site.verified},
        {site.name: "; ".join(site.notes) for site in sites if site.notes},
    )


def _by_text(texts: Mapping[str, str]) -> dict[str, str]:
    """The sites that share a text, in a few words, by that text."""
    sites: dict[str, list[str]] = {}
    for site, text in texts.items():
        sites.setdefault(text, []).append(site or "the model itself")
    return {text: _listed(names) for text, names in sites.items()}


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    more = ", ..." if len(names) > NAMED else ""
    return f"{len(names)} sites ({', '.join(names[:NAMED])}{more})"
