"""cut: remove heads from a model for good."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor, module_paths
from manyheads.capture.site import Selection, Site, Unverified
from manyheads.capture.weights import Projections, projections
from manyheads.common.compare_outputs import Captured, seeded_evaluation
from manyheads.common.run_batch import run
from manyheads.common.types import Batch, Heads
from manyheads.models.changes import Changes, changes_of, forget, replace_module, settle
from manyheads.models.no_heads import emptied
from manyheads.models.probe_batch import probe_batch, variations
from manyheads.models.torch_attention import TorchAttention
from manyheads.nn.orthogonal_rows import plain
from manyheads.surgery.head_counts import fix_head_counts, numbers_at_stake, read_regions
from manyheads.surgery.longer_batch import LENGTH, RunLengths, longer
from manyheads.surgery.plan import Plan
from manyheads.surgery.regions import Region, find_inputs, narrow, regions_of, separate
from manyheads.surgery.verify import capture, verify, verify_output
from manyheads.surgery.weight_slices import Shrink, apply, check_groups, shrinks

_SMALL = 1_000_000  # parameters: such models are held to longer sequences at no cost


def cut(
    model: nn.Module, heads: Heads, batch: Batch | None = None, *, unverified: Unverified = "refuse"
) -> nn.Module:
    """A smaller copy of a model, without these heads: rows and columns of its projections are gone.

    Which weights belong to a head is found by running the model, whatever its class. The copy is checked: its
    outputs equal those of the model with these heads silenced (1e-5 in float32), also when it generates with
    a cache, and on a much longer batch. No number in the model changes unless it must, and per-head settings
    (windows, slopes) follow their heads.

    Parameters
    ----------
    model: any torch.nn.Module. It is left as it is.
    heads: ``{layer number or site: [head numbers]}``, or a `Plan`: the heads to remove. Where several heads
        share a key head: whole groups, or the same number from every group.
    batch: a small input of the model: a dict (passed by name), a tuple or list (passed in order), or a
        tensor. transformers models need none.
    unverified: ``"allow"`` to cut heads at unverified sites, too (`Site.verified`); the copy is still checked
        against the silenced model.

    Returns
    -------
    The copy. Its ``original_heads`` lists, for each site that lost heads, which heads of the uncut model it
    still has. It can be trained, copied, saved (`save`) and cut again.

    Raises
    ------
    ValueError for heads that do not exist, for all heads of the model, for groups left unequal, for heads
    that share weights with heads that stay or do more than attend, and for numbers and settings whose meaning
    no batch shows; RuntimeError when the copy differs from the silenced model, with the first module that
    differs.

    See Also
    --------
    plan: which heads to remove.
    refit, recover: make up for them.
    prune: all of it.
    save: keep the copy.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Ainslie and others, "GQA: training generalized multi-query transformer models" (2023).

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=3, batch_first=True)
    >>> import torch
    >>> x = torch.randn(2, 5, 6)
    >>> smaller = cut(layer, {0: [1]}, (x, x, x))
    >>> smaller.query.weight.shape, smaller.output.weight.shape, smaller.original_heads
    (torch.Size([4, 6]), torch.Size([6, 4]), {'': [0, 2]})
    """
    if isinstance(heads, Plan):
        heads.check(model)
    model = plain(model)
    batch = probe_batch(model) if batch is None else batch
    sites, removed, seen = _resolved(model, heads, batch)
    for name, numbers in removed.items():
        sites[name].check("cut", unverified)
        check_groups(sites[name], numbers)
    if all(len(removed.get(name, ())) == site.heads for name, site in sites.items()):
        raise ValueError("heads: these are all heads of the whole model; leave at least one")
    copied, changes = copy.deepcopy(model), changes_of(model)
    if not removed:
        return copied
    copied = _replace_torch_attention(copied, removed, changes)
    head_weights = projections(copied, batch)
    regions = regions_of(head_weights)
    empty = [site.path for name, site in sites.items() if len(removed.get(name, ())) == site.heads]
    captured, _ = capture(model, batch, removed, {*regions, *empty})
    for path, region in regions.items():
        region.calls = list(captured[path])
        region.length = seen.longest(region.sites)
    find_inputs(model, regions, head_weights)
    losing = [region for region in regions.values() if any(name in removed for name in region.sites)]
    read_regions(copied, losing, captured)
    only, separated = separate(copied, regions, head_weights, removed, changes)
    shrunk = shrinks(head_weights, removed, only) | separated
    stake = max(numbers_at_stake(copied, region, head_weights, removed, shrunk) for region in losing)
    others = _other_batches(model, batch, seen, stake, removed, regions, changes)
    later = {path: region.calls[len(captured[path]) :] for path, region in regions.items()}
    read_regions(copied, losing, later)
    for path in dict.fromkeys(empty):
        copied = _emptied(copied, path, captured[path][0], head_weights, shrunk, changes)
    apply(copied, shrunk, changes)
    narrowed = narrow(copied, regions, removed, changes)
    changed_regions = [r for r in regions.values() if r in narrowed or r in losing]
    fix_head_counts(model, copied, changed_regions, head_weights, removed, shrunk, changes)
    settle(copied, changes)
    original_heads = _original(model, sites, removed)
    setattr(copied, "original_heads", original_heads)  # noqa: B010
    for name, site in sites.items():
        _count(changes, site, removed.get(name, []), original_heads, head_weights[name].d_key)
    modules = [region.path for region in changed_regions]
    verify(model, copied, batch, removed, modules)
    for other, silenced in others:
        verify_output(model, copied, other, removed, modules, silenced)
    return copied


def _other_batches(
    model: nn.Module,
    batch: Batch,
    seen: RunLengths,
    stake: int,
    removed: Mapping[str, list[int]],
    regions: Mapping[str, Region],
    changes: Changes,
) -> list[tuple[Batch, object]]:
    """Further batches to check the copy on, with other inputs and much longer, and the outputs of the
    silenced model for them. The regions' calls on them are recorded.

    stake: the largest number whose meaning only a batch that is longer shows.
    """
    batches: list[Batch] = list(variations(model, batch))
    small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
    enough = max(LENGTH - 1, 4 * stake)
    lengthened = longer(model, batch, seen, max(enough, 4 * LENGTH * small), enough)
    if lengthened is None:
        changes.notes.append(
            f"the batch, of length {seen.longest(seen.batch)}, could not be made longer, so the copy was "
            "not checked on longer ones"
        )
    else:
        batches.append(lengthened[0])
        for region in regions.values():
            region.length = max(region.length, lengthened[1].longest(region.sites))
    others: list[tuple[Batch, object]] = []
    for other in batches:
        captured, silenced = capture(model, other, removed, regions)
        for path, region in regions.items():
            region.calls += captured[path]
        others.append((other, silenced))
    return others


def _resolved(
    model: nn.Module, heads: Heads, batch: Batch
) -> tuple[dict[str, Site], dict[str, list[int]], RunLengths]:
    """The sites of the model, the heads to remove by site name, and how long the batch is at each site."""
    chosen = Selection(heads, module_paths(model).values())
    removed: dict[str, list[int]] = {}
    seen = RunLengths()

    def on_call(call: Call) -> None:
        seen.note(call)
        numbers = chosen.at(call.site)
        if numbers:
            removed[call.site.name] = sorted(numbers)

    with seeded_evaluation(model), Interceptor(model, on_call) as interceptor:
        run(model, batch)
    sites = interceptor.sites.by_name
    chosen.finish(sites.values())
    if not sites:
        raise ValueError("cut: no attention was seen in the model")
    return dict(sites), removed, seen


def _replace_torch_attention(
    model: nn.Module, removed: Mapping[str, list[int]], changes: Changes
) -> nn.Module:
    """Replace each nn.MultiheadAttention that loses heads by our module."""
    for name in removed:
        path = name.partition("#")[0]
        module = model.get_submodule(path)
        if isinstance(module, nn.MultiheadAttention):
            if path not in changes.replaced:
                changes.replaced.append(path)
            model = replace_module(model, path, TorchAttention.like(module))
    return model


def _emptied(
    model: nn.Module,
    path: str,
    call: Captured,
    head_weights: Mapping[str, Projections],
    shrunk: dict[str, Shrink],
    changes: Changes,
) -> nn.Module:
    """Replace a module that loses all its heads."""
    of_site = next(p for p in head_weights.values() if p.site.path == path)
    under = f"{path}." if path else ""
    inside = any(reader.startswith(under) for reader in of_site.readers)
    module = model.get_submodule(path)
    stub = emptied(module, call, inside, bool(of_site.site.cross), of_site.site.heads * of_site.d_value)
    for name in list(shrunk):
        if name.startswith(under):
            del shrunk[name]
    forget(changes, path)
    changes.emptied[path] = stub.options()
    return replace_module(model, path, stub)


def _count(
    changes: Changes,
    site: Site,
    removed: list[int],
    original_heads: Mapping[str, list[int]],
    d_key: int | None,
) -> None:
    """Record the head counts of a site, before it was ever cut and now."""
    left = [head for head in range(site.heads) if head not in removed]
    after = [len(left), len({site.kv_heads[head] for head in left})]
    first = changes.counts.get(site.name)
    before = first["before"] if first else [site.heads, len(set(site.kv_heads))]
    removed_heads = sorted(set(range(before[0])) - set(original_heads.get(site.name, range(before[0]))))
    changes.counts[site.name] = {"before": before, "after": after, "d_key": d_key, "removed": removed_heads}


def _original(
    model: nn.Module, sites: Mapping[str, Site], removed: Mapping[str, list[int]]
) -> dict[str, list[int]]:
    """The heads of the uncut model that the cut one still has, by site."""
    before: Mapping[str, list[int]] = getattr(model, "original_heads", None) or {}
    after = {name: list(numbers) for name, numbers in before.items()}
    for name, numbers in removed.items():
        old = before.get(name, range(sites[name].heads))
        after[name] = [old[head] for head in range(sites[name].heads) if head not in numbers]
    return after
