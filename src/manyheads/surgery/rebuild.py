"""rebuild: a copy of a model with its heads in another arrangement. `cut`, `grow` and `merge` are this,
checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.site import Site
from manyheads.capture.weights import Projections, projections
from manyheads.common.compare_outputs import Captured, seeded_evaluation
from manyheads.common.devices import is_offloaded
from manyheads.common.quantised import quantised_modules
from manyheads.common.run_batch import run
from manyheads.common.sharded_weights import sharded_module
from manyheads.common.types import Batch
from manyheads.models.changes import Changes, changes_of, forget, get_tensor, replace_module, settle
from manyheads.models.no_heads import emptied
from manyheads.models.per_head_inputs import hooks
from manyheads.models.probe_batch import variations
from manyheads.models.torch_attention import TorchAttention
from manyheads.models.transformers_config import note_in_config
from manyheads.surgery.arrangement import Arrangement
from manyheads.surgery.head_counts import fix_head_counts, numbers_at_stake, read_regions
from manyheads.surgery.longer_batch import LENGTH, RunLengths, longer
from manyheads.surgery.regions import Region, find_inputs, pick_inputs, regions_of, separate_tables
from manyheads.surgery.repeated_heads import follow_heads, repeat_outputs
from manyheads.surgery.verify import capture, verify, verify_output
from manyheads.surgery.weight_origins import WeightOrigin, note_origins, origins_in_torch_attention
from manyheads.surgery.weight_slices import Slice, apply_slices, slices

_SMALL = 1_000_000  # parameters: such models are held to longer sequences at no cost


@dataclass
class Rebuilt:
    """A copy of a model with its heads in another arrangement, and what it takes to check it.

    sliced: what became of its parameters.
    readers: the weights that read copied heads, as they were.
    projections: which weights each head had, by site.
    regions: the modules that hold them, and how they are called.
    """

    model: nn.Module
    arrangement: Arrangement
    sliced: dict[str, Slice]
    readers: dict[str, Tensor]
    projections: dict[str, Projections]
    regions: dict[str, Region]
    check: Callable[[], None]


def observe(model: nn.Module, batch: Batch, verb: str) -> tuple[dict[str, Site], RunLengths]:
    """The sites of a model, and how long the batch is at each of them."""
    quantised = quantised_modules(model)
    if quantised:
        path = next(iter(quantised))
        raise ValueError(
            f"{verb}: the weights of {path!r} are quantised ({type(quantised[path]).__name__}), and packed "
            f"numbers cannot be taken apart; {verb} the model before it is quantised"
        )
    if is_offloaded(model) or sharded_module(model) is not None:
        raise ValueError(
            f"{verb}: the weights of the model are offloaded or sharded, and not in memory to be changed; "
            "open it without a device map in one process, or use cut_on_disk (prune --on-disk)"
        )
    run_lengths = RunLengths()

    def on_call(call: Call) -> None:
        run_lengths.note(call)

    with seeded_evaluation(model), Interceptor(model, on_call) as interceptor:
        run(model, batch)
    if not interceptor.sites.by_name:
        raise ValueError(f"{verb}: no attention was seen in the model")
    return dict(interceptor.sites.by_name), run_lengths


def rebuild(
    model: nn.Module,
    batch: Batch,
    arrangement: Arrangement,
    run_lengths: RunLengths,
    head_weights: dict[str, Projections] | None = None,
    repeating: bool = False,
) -> Rebuilt:
    """A copy of a model whose heads are arranged like that. It is to be checked (`Rebuilt.check`).

    Where heads are copied, what reads them is shared between the copies, so that the function stays.

    run_lengths: how long the batch is at each site.
    head_weights: which weights each head has, where that is at hand.
    repeating: let smaller projections repeat their outputs, for classes that cannot have fewer key heads.
    """
    changes = changes_of(model)
    copied, replaced = replace_torch_attention(copy.deepcopy(model), arrangement, changes)
    head_weights = projections(copied, batch) if head_weights is None else head_weights
    regions = regions_of(head_weights)
    empty = [arrangement.sites[name].path for name in arrangement.emptied()]
    captured, _ = capture(model, batch, arrangement.removed, {*regions, *empty})
    for path, region in regions.items():
        region.calls = list(captured[path])
        region.length = run_lengths.longest(region.sites)
    find_inputs(model, regions, arrangement)
    changing = [region for region in regions.values() if any(map(arrangement.changes, region.sites))]
    read_regions(copied, changing, captured)
    only, separated = separate_tables(copied, regions, head_weights, arrangement, changes)
    sliced = slices(copied, head_weights, arrangement, only) | separated
    stake = max(numbers_at_stake(copied, region, head_weights, arrangement, sliced) for region in changing)
    others = _other_batches(model, batch, run_lengths, stake, arrangement, regions, changes)
    later = {path: region.calls[len(captured[path]) :] for path, region in regions.items()}
    read_regions(copied, changing, later)
    for path in dict.fromkeys(empty):
        copied = _emptied(copied, path, captured[path][0], head_weights, sliced, changes)
    readers = {n: get_tensor(copied, n).detach() for n, taken in sliced.items() if taken.shares is not None}
    apply_slices(copied, sliced, changes)
    if repeating:
        repeat_outputs(model, copied, head_weights, arrangement, sliced, changes)
    else:
        follow_heads(copied, head_weights, arrangement, sliced, changes)
    picking = pick_inputs(copied, regions, arrangement, changes)
    alone = [region for region in picking if _computes_inputs(copied, region)]
    read_regions(copied, alone, {region.path: region.calls for region in alone})
    changed_regions = [r for r in regions.values() if r in picking or r in changing]
    if not repeating:
        fix_head_counts(model, copied, changed_regions, head_weights, arrangement, sliced, changes)
    settle(copied, changes)
    original_heads = _original(model, arrangement)
    setattr(copied, "original_heads", original_heads)  # noqa: B010
    for name in arrangement.sites:
        _count(changes, arrangement, name, original_heads, head_weights[name].d_key)
    note_in_config(copied)
    note_origins(model, copied, replaced, changes.copied, sliced)
    modules = [region.path for region in changed_regions]

    def check() -> None:
        verify(model, copied, batch, arrangement, modules)
        for other, expected in others:
            verify_output(model, copied, other, arrangement, modules, expected)

    return Rebuilt(copied, arrangement, sliced, readers, head_weights, regions, check)


def _computes_inputs(model: nn.Module, region: Region) -> bool:
    """Whether a region computes an input for itself now, and may read other numbers for that."""
    return any(hook.keep is None for hook in hooks(model.get_submodule(region.path)).values())


def _other_batches(
    model: nn.Module,
    batch: Batch,
    run_lengths: RunLengths,
    stake: int,
    arrangement: Arrangement,
    regions: Mapping[str, Region],
    changes: Changes,
) -> list[tuple[Batch, object]]:
    """Further batches to check the copy on, with other inputs and much longer, and the outputs that are
    expected for them. The regions' calls on them are recorded.

    stake: the largest number whose meaning only a batch that is longer shows.
    """
    batches: list[Batch] = list(variations(model, batch))
    small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
    enough = max(LENGTH - 1, 4 * stake)
    lengthened = longer(model, batch, run_lengths, max(enough, 4 * LENGTH * small), enough)
    if lengthened is None:
        changes.notes.append(
            f"the batch, of length {run_lengths.longest(run_lengths.batch)}, could not be made longer, so "
            "the copy was not checked on longer ones"
        )
    else:
        batches.append(lengthened[0])
        for region in regions.values():
            region.length = max(region.length, lengthened[1].longest(region.sites))
    others: list[tuple[Batch, object]] = []
    for other in batches:
        captured, expected = capture(model, other, arrangement.removed, regions)
        for path, region in regions.items():
            region.calls += captured[path]
        others.append((other, expected))
    return others


def replace_torch_attention(
    model: nn.Module, arrangement: Arrangement, changes: Changes
) -> tuple[nn.Module, dict[str, WeightOrigin]]:
    """Replace each nn.MultiheadAttention whose heads change by our module. Returns the model, and where the
    parameters of those modules come from.
    """
    replaced: dict[str, WeightOrigin] = {}
    for name in filter(arrangement.changes, arrangement.sites):
        path = arrangement.sites[name].path
        module = model.get_submodule(path)
        if isinstance(module, nn.MultiheadAttention):
            if path not in changes.replaced:
                changes.replaced.append(path)
            replaced |= origins_in_torch_attention(path, module)
            model = replace_module(model, path, TorchAttention.like(module))
    return model, replaced


def _emptied(
    model: nn.Module,
    path: str,
    call: Captured,
    head_weights: Mapping[str, Projections],
    sliced: dict[str, Slice],
    changes: Changes,
) -> nn.Module:
    """Replace a module that loses all its heads."""
    of_site = next(p for p in head_weights.values() if p.site.path == path)
    under = f"{path}." if path else ""
    inside = any(reader.startswith(under) for reader in of_site.readers)
    module = model.get_submodule(path)
    stub = emptied(module, call, inside, bool(of_site.site.cross), of_site.site.heads * of_site.d_value)
    for name in list(sliced):
        if name.startswith(under):
            del sliced[name]
    forget(changes, path)
    changes.emptied[path] = stub.options()
    return replace_module(model, path, stub)


def _count(
    changes: Changes,
    arrangement: Arrangement,
    name: str,
    original_heads: Mapping[str, list[int]],
    d_key: int | None,
) -> None:
    """Record the head counts of a site, before it was ever changed and now."""
    site = arrangement.sites[name]
    first = changes.counts.get(name)
    before = first["before"] if first else [site.heads, len(set(site.kv_heads))]
    after = [len(arrangement.heads(name)), len(arrangement.key_heads(name))]
    removed = sorted(set(range(before[0])) - set(original_heads.get(name, range(before[0]))))
    changes.counts[name] = {"before": before, "after": after, "d_key": d_key, "removed": removed}


def _original(model: nn.Module, arrangement: Arrangement) -> dict[str, list[int]]:
    """The number that each head had in the first model, by site; -1, -2, ... for heads that were added."""
    before: Mapping[str, list[int]] = getattr(model, "original_heads", None) or {}
    after = {name: list(numbers) for name, numbers in before.items()}
    for name, site in arrangement.sites.items():
        if not arrangement.changes(name):
            continue
        numbers = list(before.get(name, range(site.heads)))
        lowest, after[name] = min([0, *numbers]), []
        for head in arrangement.heads(name):
            number = numbers[head]
            if number in after[name]:
                lowest -= 1
                number = lowest
            after[name].append(number)
    return after
