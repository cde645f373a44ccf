"""HeadPrices: what the heads of a model cost in bytes, parameters and time. `head_prices` measures them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manyheads.heads.table import HeadTable

WHAT = ("cache", "parameters", "latency")


@dataclass(frozen=True)
class HeadPrices:
    """What a model costs, and what it would save without some heads.

    model: its fingerprint.
    totals: ``{"cache": bytes for each token, "parameters": number, "latency": seconds of a forward pass}``;
        latency only where it was measured.
    parameters: for each module with heads, its sites, and how many parameters go once all of a set of heads
        do.
    cache: by site, the bytes of one key head with its values for each token; 0 where nothing is cached.
    seconds: by site, the measured seconds of one head.
    kv_heads: by site, the key head that each head reads.

    Examples
    --------
    >>> import torch
    >>> import manyheads as mh
    >>> model = mh.Decoder(12, heads=4, kv_heads=2, layers=2, vocabulary=17).eval()
    >>> prices = mh.head_prices(model, torch.randint(17, (2, 5)))
    >>> prices.totals["cache"], prices.saved("cache", {"blocks.0.attention": [0, 1]})
    (96.0, 24.0)
    >>> prices.saved("cache", {"blocks.0.attention": [0, 2]})            # both key heads are still read
    0.0
    """

    model: str
    totals: dict[str, float]
    parameters: dict[str, list[tuple[frozenset[int], int]]]
    cache: dict[str, float]
    kv_heads: dict[str, tuple[int, ...]]
    seconds: dict[str, float] = field(default_factory=dict)

    def saved(self, what: str, removed: Mapping[str, Iterable[int]]) -> float:
        """What a model without these heads saves, in the unit of ``totals``.

        what: "cache", "parameters" or "latency".
        removed: ``{site: heads}``; calls of one module share its weights, which are counted once.
        """
        total, counted = 0.0, set()
        for site, numbers in removed.items():
            heads = set(numbers)
            if what == "latency":
                total += len(heads) * self.seconds[site]
            elif what == "cache":
                left = {kv for head, kv in enumerate(self.kv_heads[site]) if head not in heads}
                total += (len(set(self.kv_heads[site])) - len(left)) * self.cache[site]
            elif (path := site.partition("#")[0]) not in counted:
                counted.add(path)
                total += sum(count for users, count in self.parameters[site] if users <= heads)
        return total

    def share(self, what: str, removed: Mapping[str, Iterable[int]]) -> float:
        """The same as a share of what the whole model costs."""
        if what not in self.totals:
            raise ValueError(
                f"save: the prices have no {what}; measure it by head_prices(model, latency=True)"
            )
        if not self.totals[what]:
            grows = ": what it keeps does not grow with the text" if what == "cache" else ""
            raise ValueError(f"save: this model has no {what} to save{grows}")
        return self.saved(what, removed) / self.totals[what]


def check_save(save: Mapping[str, float]) -> dict[str, float]:
    """What is to be saved, checked.

    >>> check_save({"cache": 0.5})
    {'cache': 0.5}
    >>> check_save({"cache": 50})
    Traceback (most recent call last):
    ValueError: save: got 50 for cache; expected the share that is saved, between 0 and 1
    """
    if not isinstance(save, Mapping) or not save:
        raise ValueError(f"save: got {save!r}; expected shares by name, such as {{'cache': 0.5}}")
    for what, share in save.items():
        if what not in WHAT:
            raise ValueError(f"save: got {what!r}; expected {', '.join(WHAT)}")
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
            raise ValueError(
                f"save: got {share!r} for {what}; expected the share that is saved, between 0 and 1"
            )
    return dict(save)


def read_save(text: str) -> dict[str, float]:
    """What is to be saved, by a text.

    >>> read_save("cache=0.5,parameters=0.1")
    {'cache': 0.5, 'parameters': 0.1}
    """
    save: dict[str, float] = {}
    for part in text.split(","):
        what, _, share = part.partition("=")
        if what.strip() in save:
            raise ValueError(f"save: got {what.strip()} twice; expected one share of each")
        try:
            save[what.strip()] = float(share)
        except ValueError:
            raise ValueError(f"save: got {part!r}; expected a name and a share, such as cache=0.5") from None
    return check_save(save)


def equal_prices(table: HeadTable, save: Mapping[str, float]) -> HeadPrices:
    """Prices from a table alone, where every key head of causal attention costs the same cache."""
    unknown = [what for what in save if what != "cache"]
    if unknown:
        raise ValueError(f"prices: saving {unknown[0]} needs them; pass prices=mh.head_prices(model)")
    kv_heads: dict[str, list[int]] = {}
    causal: dict[str, bool] = {}
    for row in table.rows:
        kv_heads.setdefault(row.site, []).append(row.kv_head)
        causal[row.site] = row.kind == "causal"
    cache = {site: float(causal[site]) for site in kv_heads}
    total = sum(len(set(each)) * cache[site] for site, each in kv_heads.items())
    return HeadPrices(table.model, {"cache": total}, {}, cache, {s: tuple(v) for s, v in kv_heads.items()})
