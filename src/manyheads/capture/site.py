"""Sites: the places in a model where attention happens, and heads named by layer number or site."""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from manyheads.common.types import Heads

if TYPE_CHECKING:
    from manyheads.capture.proof import Proof

Unverified = Literal["refuse", "allow"]


@dataclass(eq=False)
class Site:
    """One place in a model where attention happens.

    `name` is its module path, with ``#n`` for the n-th call (n > 1) within one outermost forward.

    >>> site = Site("encoder.layer.4.attention.self", layer=4, heads=3, kv_heads=(0, 1, 2))
    >>> site.kind, site.stack
    ('self', 'self encoder.layer.*.attention.self')
    """

    name: str
    layer: int
    heads: int
    kv_heads: tuple[int, ...]  # the key head that each head reads
    cross: bool | None = None  # keys come from another sequence; None while unknown
    causal: bool = False  # seen: several queries, none of them looking ahead
    ahead: bool = False  # seen: a query that may look ahead
    cached: bool = False  # seen: fewer queries than keys, of the same sequence
    verified: bool = False  # what it is was proved on a probe
    proof: Proof | None = field(default=None, repr=False)  # the last one that said so
    reason: str = ""  # why not
    refuted: bool = False  # it is not what it was taken for, and not measured
    notes: list[str] = field(default_factory=list)  # what one should know to read its numbers
    key_margins: tuple[int, int | None] | None = (
        None  # keys before and after those of the queries themselves, as proved
    )
    memory: bool = False  # those keys are learned, and stand for no token
    scattered: bool = False  # each call has some of its queries, standing somewhere among the keys
    in_order: bool = False  # and those of the next call stand behind them
    displaced: bool = False  # the keys stand in another order than the queries,
    reordered: bool = False  # or both in another than the tokens of the inputs
    content_masks: bool = False  # which keys are hidden depends on what the tokens are, not on a mask

    def note(self, text: str) -> None:
        """Add something that one should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def check(self, verb: str, unverified: Unverified) -> None:
        """Raise when nothing was proved of the site and ``verb`` would change something there."""
        if not self.verified and unverified != "allow":
            raise ValueError(
                f"{verb}: what the heads of {self.name!r} are could not be proved ({self.reason}); "
                "expected a site that is verified: leave it alone, or pass unverified='allow' (--unverified "
                "allow at the command line) and check the result"
            )

    @property
    def path(self) -> str:
        """The path of its module."""
        return self.name.partition("#")[0]

    @property
    def kind(self) -> str:
        """``cross`` when keys come from another sequence, ``causal`` when no query looks ahead, else
        ``self``.
        """
        if self.cross:
            return "cross"
        return "causal" if not self.ahead and (self.causal or self.cached) else "self"

    @property
    def stack(self) -> str:
        """What the layers of one stack have in common: the kind, and the path with its numbers blanked."""
        return f"{self.kind} {blanked(self.path)}"


def blanked(path: str) -> str:
    """The path with its numbers blanked.

    >>> blanked("decoder.block.11.layer.1.EncDecAttention")
    'decoder.block.*.layer.*.EncDecAttention'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


@dataclass
class Sites:
    """The sites found so far, by name, in the order of their first call.

    >>> sites = Sites()
    >>> [sites.find(name, 2, (0, 1), None).layer for name in ("h.0.attn", "h.1.attn", "mixer", "mixer#2")]
    [0, 1, 0, 1]
    """

    by_name: dict[str, Site] = field(default_factory=dict)
    _order: dict[tuple[str, bool], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, name: str, heads: int, kv_heads: tuple[int, ...], cross: bool | None) -> Site:
        """The site of this name; made and numbered when it is new."""
        with self._lock:
            site = self.by_name.get(name)
            if site is None:
                path = name.partition("#")[0]
                stack = blanked(path), bool(cross)
                order = self._order.get(stack, 0)
                self._order[stack] = order + 1
                numbers = [int(part) for part in path.split(".") if part.isdigit()]
                layer = numbers[0] if len(numbers) == 1 and name == path else order
                site = self.by_name[name] = Site(name, layer, heads, kv_heads, cross)
        return site


class Selection:
    """Heads chosen as ``{layer number or site: [head numbers]}``, resolved as sites turn up.

    >>> chosen = Selection({1: [0, 2]})
    >>> chosen.at(Site("h.1.attn", 1, heads=3, kv_heads=(0, 1, 2)))
    [0, 2]
    >>> chosen.at(Site("h.2.attn", 2, heads=3, kv_heads=(0, 1, 2)))
    []
    """

    def __init__(self, heads: Heads, paths: Iterable[str] | None = None) -> None:
        if not isinstance(heads, Mapping):
            raise TypeError(f"heads: expected {{layer or site: [head numbers]}}, got {type(heads).__name__}")
        existing = None if paths is None else set(paths)
        self.heads: dict[int | str, list[int]] = {}
        self._site_of: dict[int | str, str] = {}
        anything: Mapping[int | str, object] = heads  # type: ignore[assignment]  # checked below
        for key, numbers in anything.items():
            if not isinstance(key, str):
                key = _whole(key, "heads: a layer number")
            elif existing is not None and key.partition("#")[0] not in existing:
                raise ValueError(f"heads: the model has no module {key.partition('#')[0]!r}")
            if isinstance(numbers, str) or not isinstance(numbers, Iterable):
                raise TypeError(f"heads: expected a list of head numbers for {key!r}, got {numbers!r}")
            self.heads[_plain(key)] = [_whole(number, f"heads[{key!r}]: a head number") for number in numbers]

    def at(self, site: Site) -> list[int]:
        """The heads chosen at this site, in the order they were named. Raises when one does not exist."""
        chosen: list[int] = []
        for key in (site.name, site.layer):
            numbers = self.heads.get(key)
            if numbers is None:
                continue
            name = self._site_of.setdefault(key, site.name)
            if name != site.name:
                raise ValueError(
                    f"heads: layer {key} fits several sites: {name!r} and {site.name!r}; "
                    "name the one you mean"
                )
            for number in numbers:
                if number >= site.heads:
                    raise ValueError(
                        f"heads: {site.name!r} has {site.heads} heads, 0 to {site.heads - 1}; "
                        f"there is no head {number}"
                    )
            chosen += [number for number in numbers if number not in chosen]
        return chosen

    def finish(self, sites: Iterable[Site]) -> None:
        """Raise when something named was never called, or is not what it was taken for."""
        sites = list(sites)
        for site in sites:
            if site.refuted and self.at(site):
                raise ValueError(
                    f"heads: those of {site.name!r} are not what they seem to be ({site.reason}); expected "
                    "heads of another site"
                )
        missing = [key for key in self.heads if key not in self._site_of]
        if missing:
            site_names = ", ".join(f"{site.name!r} (layer {site.layer})" for site in sites) or "none"
            unknown_names = ", ".join(
                repr(key) if isinstance(key, str) else f"layer {key}" for key in missing
            )
            raise ValueError(
                f"heads: {unknown_names} was never called, so nothing was done there. "
                f"Attention seen: {site_names}"
            )


def _plain(key: int | str) -> int | str:
    return re.sub(r"#1$", "", key) if isinstance(key, str) else key


def _whole(value: object, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what}: expected a whole number, got {value!r}") from None
    if number < 0:
        raise ValueError(f"{what}: expected 0 or more, got {number}")
    return number
