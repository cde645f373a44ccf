"""The search for the head counts that a module keeps: candidates by value, changed and tried.

When a module loses heads, its attributes must change, too: ``num_heads``, ``split_size``,
``num_key_value_groups``, and whatever else its author called them. Every whole number that the module reads
and that could be one of them is a candidate; the module is run alone until its output is that of the silenced
one. Then each number is set back, and stays so if the output is still right.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyheads.common.types import Arguments
from manyheads.models.changes import copy_config, set_value
from manyheads.surgery.attribute_tracing import Reads

_TRIES = 4000
_LARGE = 16  # widths are at least this, in models that are not toys
_COUNTS = re.compile(r"head(?!_?(dim|size))|groups?$|^h$|^n_rep$|^all_head|_heads?_size$")
_MODEL = re.compile(
    r"embed|hidden|model|input|width|layer|window|position|patch|vocab|kernel|idx|index|head_?(dim|size)$"
)
_OF_TORCH = ("groups", "num_groups", "num_channels")  # of torch's own modules; their weights say the rest


Key = tuple[str, tuple[str, ...], bool]  # the module, the path in it, whether it is of a config


@dataclass(frozen=True, eq=False)
class Candidate:
    """A value in a module that may have to change: where it is, and the options to try, the likeliest first.

    axes: for a setting of every head, the axis and the number of entries of each option but the first.
    """

    module: str  # path inside the region
    path: tuple[str, ...]
    options: Arguments  # whole numbers, or settings with an entry for every head
    old: Any
    config: bool = False
    axes: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> Key:
        """The same for this number in every layer."""
        return self.module, self.path, self.config

    @property
    def attribute(self) -> str:
        """The name of the attribute that holds it."""
        return f"config.{self.path[0]}" if self.config else self.path[0]

    @property
    def name(self) -> str:
        """Its full name, for messages."""
        return ".".join(part for part in (self.module, "config" * self.config, *self.path) if part)


def candidate_numbers(
    modules: Mapping[str, nn.Module], sizes: Mapping[int, list[int]], configs: bool, reads: Reads
) -> list[Candidate]:
    """The numbers that these modules read and that are among the sizes."""
    matching = []
    for name, module in modules.items():
        of_torch = type(module).__module__.startswith("torch.nn.")
        for attribute, value in vars(module).items():
            hidden = attribute.startswith("_") and attribute != "_axes_lengths"
            if hidden or (of_torch and attribute not in _OF_TORCH) or attribute not in reads.get(name, ()):
                continue
            for path, old in _numbers(value, (attribute,)):
                if old in sizes:
                    matching.append(Candidate(name, path, _ordered(path, old, sizes[old]), old))
        config = getattr(module, "config", None)
        if configs and config is not None and not of_torch:
            for attribute, old in vars(config).items():
                if type(old) is int and old in sizes and f"config.{attribute}" in reads.get(name, ()):
                    options = _ordered((attribute,), old, sizes[old])
                    matching.append(Candidate(name, (attribute,), options, old, config=True))
    return matching


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Whole numbers in a value, also inside dicts, lists and tuples."""
    if type(value) is int:
        yield path, value
    elif isinstance(value, dict) and len(path) < 4:
        for key, item in value.items():
            if isinstance(key, str) and "." not in key:
                yield from _numbers(item, (*path, key))
    elif type(value) in (list, tuple) and len(path) < 4 and len(value) < 9:
        for index, item in enumerate(value):
            yield from _numbers(item, (*path, str(index)))


def _ordered(path: tuple[str, ...], old: int, new: list[int]) -> tuple[int, ...]:
    return (*new, old) if _likely(path, old) else (old, *new)


def _likely(path: tuple[str, ...], old: int) -> bool:
    """Whether a number's name suggests a head count."""
    name = ".".join(path).lower()
    return bool(_COUNTS.search(name)) or (old >= _LARGE and not _MODEL.search(name))


def search_numbers(
    region: nn.Module,
    numbers: list[Candidate],
    holds: Callable[[], bool],
    right_options: Mapping[Key, int],
) -> dict[Candidate, object] | None:
    """Set the candidates inside a region so that ``holds`` is true, changing as few as possible; None when no
    choice makes it true.

    known: which option was right for the same candidate in another layer; tried first.
    """
    orders = []
    for candidate in numbers:
        options = list(candidate.options)
        if candidate.key in right_options and right_options[candidate.key] < len(options):
            options.insert(0, options.pop(right_options[candidate.key]))
        orders.append(options)
    values = Values(region, numbers)
    for attempt, choice in enumerate(_choices(orders)):
        if attempt >= _TRIES:
            break
        chosen = {c: value for c, value in zip(numbers, choice, strict=True) if value is not c.old}
        replaced = {(c.module, c.path[0]) for c in chosen if c.axes}
        if any((c.module, c.path[0]) in replaced for c in chosen if not c.axes):
            continue  # a number inside a setting that is another one now
        values.put(chosen)
        if holds():
            return _fewest(chosen, values, holds)
    values.put({})
    return None


def _fewest(
    chosen: dict[Candidate, object], values: Values, holds: Callable[[], bool]
) -> dict[Candidate, object]:
    """Undo the changes that are not needed, beginning with names that do not suggest heads."""
    order = sorted(chosen, key=lambda c: not c.axes and _likely(c.path, c.old))
    improved = True
    while improved:
        improved = False
        for candidate in order:
            fewer = {c: value for c, value in chosen.items() if c is not candidate}
            if len(fewer) < len(chosen):
                values.put(fewer)
                if holds():
                    chosen, improved = fewer, True
    values.put(chosen)
    return chosen


def _choices(orders: list[list[object]]) -> Iterator[tuple[object, ...]]:
    """Every choice of one option each, those with the fewest second options first."""
    for flips in range(len(orders) + 1):
        for flipped in itertools.combinations(range(len(orders)), flips):
            later = [orders[i][1:] if i in flipped else orders[i][:1] for i in range(len(orders))]
            yield from itertools.product(*later)


class Values:
    """The values of candidates in a region, which can be set and restored."""

    def __init__(self, region: nn.Module, numbers: list[Candidate]) -> None:
        self.region = region
        self.before = [
            (self.owner(c), c.path[0], getattr(self.owner(c), c.path[0])) for c in numbers if not c.config
        ]
        modules = {c.module for c in numbers if c.config}
        self.configs = [(region.get_submodule(m), region.get_submodule(m).config) for m in modules]

    def owner(self, candidate: Candidate) -> nn.Module:
        """The module that holds a candidate."""
        return self.region.get_submodule(candidate.module)

    def put(self, chosen: Mapping[Candidate, object]) -> None:
        """Set these candidates, and restore all others."""
        for owner, name, value in self.before:
            setattr(owner, name, value)
        for owner, config in self.configs:
            owner.config = config
        for candidate, value in chosen.items():
            if candidate.config:
                copy_config(self.owner(candidate), {candidate.path[0]: value})
            else:
                set_value(self.owner(candidate), candidate.path, value)
