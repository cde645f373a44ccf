"""The numbers of heads that a module has written down: found by value, changed, and tried.

A module that lost heads must also be told so: ``num_heads``, ``all_head_size``, ``split_size``,
``num_key_value_groups``, and whatever else its author called it. Every whole number in the module that could
be one of them is a candidate; the module is run on its own until it gives what the silenced one gave.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyheads.surgery.changes import own_config, set_value

_TRIES = 4000
_LARGE = 16  # widths are at least this, in models that are not toys
_COUNTS = re.compile(r"head(?!_?(dim|size))|groups?$|^h$|^n_rep$|^all_head|_heads?_size$")
_MODEL = re.compile(
    r"embed|hidden|model|input|width|layer|window|position|patch|vocab|kernel|idx|index|head_?(dim|size)$"
)


@dataclass(frozen=True)
class Candidate:
    """A number in a module that may have to change: where it is, and the values to try, likeliest first."""

    module: str  # path inside the region
    path: tuple[str, ...]
    options: tuple[int, ...]
    old: int
    config: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What it has in common with the same number in the next layer."""
        return self.module, self.path, self.config


def candidates(
    modules: Mapping[str, nn.Module], sizes: Mapping[int, list[int]], configs: bool
) -> list[Candidate]:
    """The numbers in these modules that are among the sizes."""
    found = []
    for name, module in modules.items():
        if type(module).__module__.startswith("torch.nn."):
            continue
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") or attribute == "_axes_lengths":
                for path, old in _numbers(value, (attribute,)):
                    if old in sizes:
                        found.append(Candidate(name, path, _ordered(path, old, sizes[old]), old))
        config = getattr(module, "config", None)
        if configs and config is not None:
            for attribute, old in vars(config).items():
                if type(old) is int and old in sizes:
                    options = _ordered((attribute,), old, sizes[old])
                    found.append(Candidate(name, (attribute,), options, old, config=True))
    return found


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Whole numbers in a value, also inside dicts, lists and tuples."""
    if type(value) is int:
        yield path, value
    elif isinstance(value, dict) and len(path) < 4:
        for key, item in value.items():
            if isinstance(key, str) and "." not in key:
                yield from _numbers(item, (*path, key))
    elif type(value) in (list, tuple) and len(path) < 4 and len(value) < 9:
        for place, item in enumerate(value):
            yield from _numbers(item, (*path, str(place)))


def _ordered(path: tuple[str, ...], old: int, new: list[int]) -> tuple[int, ...]:
    name = ".".join(path).lower()
    likely = bool(_COUNTS.search(name)) or (old >= _LARGE and not _MODEL.search(name))
    return (*new, old) if likely else (old, *new)


def find(
    copied: nn.Module,
    found: list[Candidate],
    holds: Callable[[], bool],
    known: Mapping[tuple[Any, ...], int],
) -> list[tuple[Candidate, int]] | None:
    """Set the candidates, inside ``copied``, so that ``holds`` is true; None when nothing makes it so.

    known: which option was right for the same candidate in another layer; tried first.
    """
    orders = []
    for candidate in found:
        options = list(candidate.options)
        if candidate.key in known and known[candidate.key] < len(options):
            options.insert(0, options.pop(known[candidate.key]))
        orders.append(options)
    originals = _Originals(copied, found)
    for number, choice in enumerate(_choices(orders)):
        if number >= _TRIES:
            break
        originals.restore()
        chosen = list(zip(found, choice, strict=True))
        for candidate, value in chosen:
            originals.set(candidate, value)
        if holds():
            return [(candidate, value) for candidate, value in chosen if value != candidate.old]
    originals.restore()
    return None


def _choices(orders: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Every choice of one option each, those with the fewest second thoughts first."""
    for flips in range(len(orders) + 1):
        for places in itertools.combinations(range(len(orders)), flips):
            later = [orders[i][1:] if i in places else orders[i][:1] for i in range(len(orders))]
            yield from itertools.product(*later)


class _Originals:
    """The values that candidates had, to go back to."""

    def __init__(self, region: nn.Module, found: list[Candidate]) -> None:
        self.region = region
        self.values = [
            (self.owner(c), c.path[0], getattr(self.owner(c), c.path[0])) for c in found if not c.config
        ]
        modules = {c.module for c in found if c.config}
        self.configs = [(region.get_submodule(m), region.get_submodule(m).config) for m in modules]

    def owner(self, candidate: Candidate) -> nn.Module:
        return self.region.get_submodule(candidate.module)

    def restore(self) -> None:
        for owner, name, value in self.values:
            setattr(owner, name, value)
        for owner, config in self.configs:
            owner.config = config

    def set(self, candidate: Candidate, value: int) -> None:
        if not candidate.config:
            set_value(self.owner(candidate), candidate.path, value)
        elif value != candidate.old:
            own_config(self.owner(candidate), {candidate.path[0]: value})
