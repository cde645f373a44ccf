"""Regions: the smallest modules that hold an attention call and its projections, told what they lost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from manyheads.heads.projections import ROLES, Projections
from manyheads.surgery import shrink
from manyheads.surgery.changes import Changes, copy_source
from manyheads.surgery.counts import Candidate, candidates, find
from manyheads.surgery.empty import NoHeads
from manyheads.surgery.inputs import Input, Narrow, hooks, inputs_of_heads
from manyheads.surgery.outputs import Captured, difference
from manyheads.surgery.torch_attention import TorchAttention
from manyheads.surgery.verify import evaluating, own_output, tolerance
from manyheads.surgery.widths import Width, telling, width_of

Removed = Mapping[str, list[int]]


@dataclass
class Region:
    """One such module: its path, the names of its sites, and how it was called in the silenced model."""

    path: str
    sites: list[str]
    calls: list[Captured] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)

    def holds(self, name: str) -> bool:
        """Whether a parameter or module of this name is inside."""
        return not self.path or name.startswith(f"{self.path}.")


def regions_of(found: Mapping[str, Projections]) -> dict[str, Region]:
    """The regions of a model, by path."""
    regions: dict[str, Region] = {}
    for name, mine in found.items():
        paths = [mine.site.path]
        for head in mine.heads:
            parts = [part for role in ROLES for part in getattr(head, role)]
            paths += [part.parameter.rpartition(".")[0] for part in parts]
        path = _common(paths)
        regions.setdefault(path, Region(path, [])).sites.append(name)
    return regions


def _common(paths: list[str]) -> str:
    """The longest path that all of these begin with."""
    common = paths[0].split(".")
    for path in paths[1:]:
        parts = path.split(".")
        while parts[: len(common)] != common:
            common.pop()
    return ".".join(common)


def find_inputs(model: nn.Module, regions: Mapping[str, Region], found: Mapping[str, Projections]) -> None:
    """Note which regions are given something for every head; refuse one that is no module of its own."""
    for region in regions.values():
        if not region.calls:
            raise ValueError(
                f"heads: cannot cut at {region.sites[0]!r}: its projections lie in {region.path!r}, which is "
                "never called as a module (x(...), not x.forward(...)), so that it cannot be held to itself"
            )
        module, call = model.get_submodule(region.path), region.calls[0]
        heads = found[region.sites[0]].site.heads
        if not isinstance(module, nn.MultiheadAttention | TorchAttention):
            with evaluating(module):
                region.inputs = inputs_of_heads(module, heads, *call.given())


def separate(
    copied: nn.Module,
    regions: Mapping[str, Region],
    found: Mapping[str, Projections],
    removed: Removed,
    changes: Changes,
) -> tuple[dict[str, set[str]], dict[str, shrink.Shrink]]:
    """Where a region's table of numbers for each head goes to other regions, too, which lose other heads:
    give those a table of their own, as T5 needs.

    Returns
    -------
    For each such table the sites that go on using it, and what stays of the new ones.
    """
    only: dict[str, set[str]] = {}
    own: dict[str, shrink.Shrink] = {}
    tables = {name for mine in found.values() for head in mine.heads for name, _, _ in head.extras}
    for table in sorted(tables):
        using = {name for name, mine in found.items() if table in mine.users}
        source = max(
            (region for region in regions.values() if region.path and region.holds(table)),
            key=lambda region: len(region.path),
            default=None,
        )
        if source is None or len({tuple(removed.get(name, ())) for name in using}) == 1:
            continue
        only[table] = using & set(source.sites)
        for name in sorted(using - only[table]):
            path = next(region.path for region in regions.values() if name in region.sites)
            if len(removed.get(name, ())) == found[name].site.heads:
                continue
            copy_source(copied, path, source.path)
            changes.copied[path] = source.path
            axis, users = found[name].users[table]
            gone = set(removed.get(name, ()))
            keep = [index for index, heads in enumerate(users) if not heads or not heads <= gone]
            own[path + table.removeprefix(source.path)] = shrink.Shrink(axis, keep, len(users))
    return only, own


def narrow(
    copied: nn.Module, regions: Mapping[str, Region], removed: Removed, changes: Changes
) -> list[Region]:
    """Have regions get what they are given for the heads they kept. Gives the regions that changed."""
    changed = []
    for region in regions.values():
        gone = removed.get(region.sites[0], [])
        module = copied.get_submodule(region.path)
        if isinstance(module, NoHeads):
            continue
        for given in region.inputs:
            if given.argument in hooks(module) and hooks(module)[given.argument].keep is None:
                continue
            source = region.calls[0].handed.get(given.argument)
            chain = [regions[source], *_receivers(regions, source)] if source is not None else [region]
            fates = {tuple(removed.get(other.sites[0], ())) for other in chain}
            if fates == {()}:
                continue
            hook = Narrow(given.argument, given.axis, len(given.of), given.keep(gone))
            if source is not None and len(fates) == 1:  # it will come without those heads
                for call in region.calls:
                    call.args, call.kwargs = hook(module, call.args, call.kwargs)
                continue
            if source is not None:
                hook.keep = None
            hook.attach(module)
            options = {"argument": hook.argument, "axis": hook.axis, "heads": hook.heads, "keep": hook.keep}
            before = [o for o in changes.inputs.get(region.path, []) if o["argument"] != hook.argument]
            changes.inputs[region.path] = [*before, options]
            changed.append(region)
    return changed


def _receivers(regions: Mapping[str, Region], source: str) -> list[Region]:
    return [region for region in regions.values() if source in region.calls[0].handed.values()]


def tell(
    copied: nn.Module,
    regions: list[Region],
    found: Mapping[str, Projections],
    removed: Removed,
    shrunk: Mapping[str, shrink.Shrink],
    changes: Changes,
) -> None:
    """Find the numbers of heads that the modules have written down, and change them."""
    known: dict[tuple[Any, ...], int] = {}
    allowed = 10 * tolerance(copied)
    for region in regions:
        module = copied.get_submodule(region.path)
        gone = removed.get(region.sites[0], [])
        inside = {name: s for name, s in shrunk.items() if region.holds(name)}
        sizes: dict[int, list[int]] = {}
        for name in region.sites:
            for before, after in shrink.sizes(found[name], removed.get(name, []), inside).items():
                sizes[before] = list(dict.fromkeys([*sizes.get(before, []), *after]))
        modules = dict(module.named_modules())
        for part in modules.values():
            if isinstance(part, TorchAttention):
                part.kept = [old for new, old in enumerate(part.kept) if new not in gone]
        holds = _Runs(module, region.calls, allowed)
        for configs, widths in itertools.product((False, True), _widths(copied, region, found, removed)):
            numbers = candidates(modules, sizes, configs)
            with telling(copied, widths):
                chosen = find(module, numbers, holds, known)
            if chosen is not None:
                break
        else:
            raise RuntimeError(
                f"cut: {region.path or 'the model'} ({type(module).__name__}) does not give without heads "
                f"{gone} what it gives with them silenced: {_why(module, region.calls)}. Its code may have "
                "the number of its heads written into it as a number: let it read an attribute; nothing was "
                "changed"
            )
        for path, width in widths.items():
            width.attach(copied.get_submodule(path))
            changes.widths[path] = width.options()
        values = dict(chosen)
        for candidate in numbers:
            known[candidate.key] = candidate.options.index(values.get(candidate, candidate.old))
        _note(changes, region.path, modules, values)


def _widths(
    copied: nn.Module, region: Region, found: Mapping[str, Projections], removed: Removed
) -> list[dict[str, Width]]:
    """What the inputs of modules that read the width of all heads off them may have to say: nothing, or the
    width that is left, to the modules of the sites or to the whole region.
    """
    choices: list[dict[str, Width]] = [{}, {}, {}]
    for name in region.sites:
        mine = found[name]
        left = mine.site.heads - len(removed.get(name, ()))
        for path, many in ((mine.site.path, 1), (region.path, 2)):
            known = width_of(copied.get_submodule(path))
            before = known.before if known is not None else mine.site.heads * mine.d_value
            for choice in choices[many:]:
                choice[path] = Width(before, left * mine.d_value)
    return choices if choices[1].keys() != choices[2].keys() else choices[:2]


def _note(
    changes: Changes, path: str, modules: Mapping[str, nn.Module], values: Mapping[Candidate, int]
) -> None:
    for candidate, value in values.items():
        into = changes.configs if candidate.config else changes.attributes
        into.setdefault(_joined(path, candidate.module), {})[".".join(candidate.path)] = value
    for name, module in modules.items():
        if isinstance(module, TorchAttention):
            changes.attributes.setdefault(_joined(path, name), {})["kept"] = module.kept


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class _Runs:
    """Whether a module gives what it gave in the silenced model."""

    def __init__(self, module: nn.Module, calls: list[Captured], allowed: float) -> None:
        self.module, self.calls, self.allowed = module, calls, allowed

    def __call__(self) -> bool:
        try:
            return all(off <= self.allowed for off in _differences(self.module, self.calls))
        except Exception:  # these numbers do not fit
            return False


def _differences(module: nn.Module, calls: list[Captured]) -> list[float]:
    found = []
    with evaluating(module):
        for call in calls:
            args, kwargs = call.given()
            got = module(*args, **kwargs)
            found.append(difference(own_output(module, call.output), own_output(module, got)))
    return found


def _why(module: nn.Module, calls: list[Captured]) -> str:
    try:
        off = max(_differences(module, calls))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return f"its output is off by {off:.2g}"
