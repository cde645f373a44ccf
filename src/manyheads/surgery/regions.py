"""Regions: the smallest modules that hold an attention call and its projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from manyheads.capture.weights import ROLES, Projections
from manyheads.common.compare_outputs import Captured, seeded_evaluation
from manyheads.models.changes import Changes, copy_source
from manyheads.models.no_heads import NoHeads
from manyheads.models.per_head_inputs import Input, Pick, hooks
from manyheads.models.torch_attention import TorchAttention
from manyheads.surgery.arrangement import Arrangement, arranged
from manyheads.surgery.attribute_tracing import Reads
from manyheads.surgery.head_count_search import Key
from manyheads.surgery.per_head_inputs import inputs_of_heads
from manyheads.surgery.weight_slices import Slice


@dataclass
class Region:
    """One such module: its path, the names of its sites, and how it was called in the model that
    is expected."""

    path: str
    sites: list[str]
    calls: list[Captured] = field(default_factory=list)  # short ones first
    inputs: list[Input] = field(default_factory=list)
    reads: Reads = field(default_factory=dict)
    split: set[Key] = field(default_factory=set)  # keys of numbers that only split axes
    length: int = 0  # the most queries or keys in any of the calls

    def holds(self, name: str) -> bool:
        """Whether a parameter or module of this name is inside."""
        return not self.path or name.startswith(f"{self.path}.")


def regions_of(projections: Mapping[str, Projections]) -> dict[str, Region]:
    """The regions of a model, by path."""
    regions: dict[str, Region] = {}
    for name, of_site in projections.items():
        paths = [of_site.site.path]
        for head in of_site.heads:
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


def find_inputs(model: nn.Module, regions: Mapping[str, Region], arrangement: Arrangement) -> None:
    """Note which regions take an input for every head; refuse a region that is never called as a module."""
    for region in regions.values():
        if not region.calls:
            raise ValueError(
                f"heads: cannot {arrangement.verb} at {region.sites[0]!r}: its projections lie in "
                f"{region.path!r}, which is never called as a module (x(...), not x.forward(...)), so its "
                "output cannot be checked"
            )
        module, call = model.get_submodule(region.path), region.calls[0]
        heads = arrangement.sites[region.sites[0]].heads
        if not isinstance(module, nn.MultiheadAttention | TorchAttention):
            with seeded_evaluation(module):
                region.inputs = inputs_of_heads(module, heads, *call.arguments())


def separate_tables(
    copied: nn.Module,
    regions: Mapping[str, Region],
    projections: Mapping[str, Projections],
    arrangement: Arrangement,
    changes: Changes,
) -> tuple[dict[str, set[str]], dict[str, Slice]]:
    """Give a region its own copy of a per-head table that it shares with regions whose heads change in
    another way, as T5 needs.

    Returns
    -------
    For each such table the sites that go on using it, and what becomes of the new ones.
    """
    only: dict[str, set[str]] = {}
    separated: dict[str, Slice] = {}
    tables = {
        name for of_site in projections.values() for head in of_site.heads for name, _, _ in head.extras
    }
    for table in sorted(tables):
        using = {name for name, of_site in projections.items() if table in of_site.users}
        source = max(
            (region for region in regions.values() if region.path and region.holds(table)),
            key=lambda region: len(region.path),
            default=None,
        )
        if source is None or len({tuple(arrangement.heads(name)) for name in using}) == 1:
            continue
        only[table] = using & set(source.sites)
        for name in sorted(using - only[table]):
            path = next(region.path for region in regions.values() if name in region.sites)
            if not arrangement.heads(name):
                continue
            copy_source(copied, path, source.path)
            changes.copied[path] = source.path
            axis, users = projections[name].users[table]
            kept = arranged(users, arrangement.removed.get(name, ()), arrangement.copied.get(name, ()))
            separated[path + table.removeprefix(source.path)] = Slice(axis, kept, len(users))
    return only, separated


def pick_inputs(
    copied: nn.Module, regions: Mapping[str, Region], arrangement: Arrangement, changes: Changes
) -> list[Region]:
    """Let the per-head inputs of regions have the entries of the heads that they have now. Returns the
    regions that changed.
    """
    changed = []
    for region in regions.values():
        module = copied.get_submodule(region.path)
        if isinstance(module, NoHeads):
            continue
        for per_head in region.inputs:
            if per_head.argument in hooks(module) and hooks(module)[per_head.argument].keep is None:
                continue
            source = region.calls[0].producers.get(per_head.argument)
            chain = [regions[source], *_receivers(regions, source)] if source is not None else [region]
            if not any(arrangement.changes(other.sites[0]) for other in chain):
                continue
            alike = len({tuple(arrangement.heads(other.sites[0])) for other in chain}) == 1
            kept = per_head.of(arrangement.heads(region.sites[0]))
            hook = Pick(per_head.argument, per_head.axis, per_head.size, kept)
            if source is not None and alike:  # it will come for the new heads
                for call in region.calls:
                    call.args, call.kwargs = hook(module, call.args, call.kwargs)
                continue
            if source is not None:
                hook.keep = None
            hook.attach(module)
            before = [o for o in changes.inputs.get(region.path, []) if o["argument"] != hook.argument]
            changes.inputs[region.path] = [*before, hook.options()]
            changed.append(region)
    return changed


def _receivers(regions: Mapping[str, Region], source: str) -> list[Region]:
    return [region for region in regions.values() if source in region.calls[0].producers.values()]
