"""Head counts in modules whose heads change: numbers, per-head settings, widths read off an input."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from manyheads.capture.weights import Projections
from manyheads.common.compare_outputs import Captured, relative_difference, seeded_evaluation, tolerance
from manyheads.common.errors import FailedChangeError, describe_error
from manyheads.models.changes import Changes, get_tensor
from manyheads.models.reported_width import Width, reporting, width_of
from manyheads.models.torch_attention import TorchAttention
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.surgery.arrangement import Arrangement
from manyheads.surgery.attribute_tracing import AttributeReads
from manyheads.surgery.head_count_search import Candidate, Key, Values, candidate_numbers, search_numbers
from manyheads.surgery.noisy_module import with_noise
from manyheads.surgery.per_head_settings import begins_alike, largest_number, settings
from manyheads.surgery.regions import Region
from manyheads.surgery.verify import compared_output
from manyheads.surgery.weight_slices import Slice, possible_sizes, readers

_FAR = 256  # 4 times as long shows settings that code computes from the numbers of heads
_WIDELY = 4  # a batch shows what a number is for when it is this many times longer


def read_regions(model: nn.Module, regions: list[Region], calls: Mapping[str, list[Captured]]) -> None:
    """Record which attributes the modules of each region read on these calls, besides earlier ones."""
    for region in regions:
        names = _read(model.get_submodule(region.path), calls[region.path], {}).names
        region.reads = {path: region.reads.get(path, frozenset()) | read for path, read in names.items()}


def numbers_at_stake(
    model: nn.Module,
    region: Region,
    projections: Mapping[str, Projections],
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
) -> int:
    """The largest number in a region that may have to change, or that is a setting of one head, and whose
    meaning only a longer batch shows. Records which numbers only split axes.
    """
    module = model.get_submodule(region.path)
    modules = dict(module.named_modules())
    numbers = candidate_numbers(modules, _sizes(region, projections, arrangement, sliced), True, region.reads)
    attributes: dict[str, set[str]] = {}
    for candidate in numbers:
        attributes.setdefault(candidate.module, set()).add(candidate.attribute)
    reading = _read(module, region.calls, attributes)
    region.split = {c.key for c in numbers if reading.only_sizes(c.module, c.attribute)}
    per_head = settings(modules, region.reads, _sources(region, projections, arrangement), set())
    doubtful = [c.old for c in numbers if c.key not in region.split]
    sites = [projections[name].site for name in region.sites]
    if any({site.heads, len(set(site.kv_heads))} & set(doubtful) for site in sites):
        doubtful.append(_FAR)
    return max([*doubtful, *(largest_number(candidate.old) for candidate in per_head)], default=0)


def _read(module: nn.Module, calls: list[Captured], numbers: Mapping[str, set[str]]) -> AttributeReads:
    """Run a module on calls, and record what it reads."""
    reading = AttributeReads(module, numbers)
    try:
        with seeded_evaluation(module), reading:
            for call in calls:
                args, kwargs = call.arguments()
                module(*args, **kwargs)
    except Exception:  # code that does not run under tracing: then it may have read everything
        reading = AttributeReads(module)
        for path, part in module.named_modules():
            config = vars(getattr(part, "config", None) or reading)
            reading.names[path] = {*vars(part), *part._buffers, *part._parameters}
            reading.names[path] |= {f"config.{name}" for name in config}
    return reading


def fix_head_counts(
    model: nn.Module,
    copied: nn.Module,
    regions: list[Region],
    projections: Mapping[str, Projections],
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
    changes: Changes,
) -> None:
    """Find the head counts that the modules of these regions keep, and change them.

    model: the model that was copied.
    """
    right_options: dict[Key, int] = {}
    allowed = 10 * tolerance(copied)
    for region in regions:
        module = copied.get_submodule(region.path)
        modules = dict(module.named_modules())
        for part in modules.values():
            if isinstance(part, TorchAttention):
                part.kept = [part.kept[head] for head in arrangement.heads(region.sites[0])]
        _set_ours(copied, region, arrangement, changes)
        becomes = _sizes(region, projections, arrangement, sliced)
        per_head = settings(
            modules,
            region.reads,
            _sources(region, projections, arrangement),
            _weights(region, projections),
        )
        holds = OutputCheck(module, region.calls, allowed)
        for configs, widths in itertools.product(
            (False, True), _widths(copied, region, projections, arrangement)
        ):
            numbers = [*candidate_numbers(modules, becomes, configs, region.reads), *per_head]
            values = Values(module, numbers)
            with reporting(copied, widths):
                chosen = search_numbers(module, numbers, holds, right_options)
                if chosen is not None and _ambiguous(region, module, numbers, chosen, holds):
                    chosen = _from_noise(model, region, arrangement, sliced, numbers, values, holds)
                if chosen is not None:
                    break
        else:
            _check_readers(model, region, projections, arrangement, sliced)
            output = "it has with them silenced" if arrangement.verb == "cut" else "it has without them"
            raise FailedChangeError(
                f"{arrangement.verb}: {region.path or 'the model'} ({type(module).__name__}) "
                f"{arrangement.describe(region.sites[0])} does not give the output that {output}: "
                f"{_reason(module, region.calls)}. Its code may have the number of heads written into it as "
                "a number: let it read an attribute; nothing was changed"
            )
        _check_lengths(region, chosen, arrangement, changes)
        for path, width in widths.items():
            width.attach(copied.get_submodule(path))
            changes.widths[path] = width.options()
        for candidate in numbers:
            value = chosen.get(candidate, candidate.old)
            right_options[candidate.key] = next(
                i for i, option in enumerate(candidate.options) if option is value
            )
        changing = [projections[name].site.path for name in region.sites if arrangement.changes(name)]
        _note(changes, region.path, changing, modules, chosen, _sources(region, projections, arrangement))


def _set_ours(copied: nn.Module, region: Region, arrangement: Arrangement, changes: Changes) -> None:
    """Set the head counts of our own attention, whose names are known."""
    for name in region.sites:
        path = arrangement.sites[name].path
        module = copied.get_submodule(path)
        if isinstance(module, MultiHeadAttention) and arrangement.changes(name):
            module.heads, module.kv_heads = len(arrangement.heads(name)), len(arrangement.key_heads(name))
            numbers = {"heads": module.heads, "kv_heads": module.kv_heads}
            changes.attributes.setdefault(path, {}).update(numbers)


def _check_readers(
    model: nn.Module,
    region: Region,
    projections: Mapping[str, Projections],
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
) -> None:
    """Refuse to remove heads that do more than attend.

    Silenced, a head's attention gives zero. Where more goes into the weights that read it (a convolution of
    the values, a norm over all heads), columns that are gone cannot give what is left; where something else
    reads its values, rows that are gone cannot.
    """
    if not arrangement.removed:
        return
    module = copy.deepcopy(model.get_submodule(region.path))
    start = len(region.path) + 1 if region.path else 0
    reading = {
        part.parameter
        for name in region.sites
        for head in arrangement.removed.get(name, ())
        for part in readers(projections[name], head)
    }
    inside = {name for name in sliced if region.holds(name)}
    for names, why in (
        (inside & reading, "the weights that read the head read more than what its attention gives"),
        (inside - reading, "the weights of the head are read by more than its attention"),
    ):
        for name in names & {
            region.path + "." * bool(start) + inner for inner, _ in module.named_parameters()
        }:
            weight, removed = get_tensor(module, name[start:]), sorted(sliced[name].touched)
            with torch.no_grad():
                weight.index_fill_(sliced[name].axis, torch.tensor(removed, device=weight.device), 0.0)
        if OutputCheck(module, region.calls, 10 * tolerance(model)).fails():
            raise ValueError(
                f"heads: cannot cut at {region.sites[0]!r}: {why} (such as a convolution of the values, or a "
                "norm over all heads), so that without them the output is not that of the silenced module"
            )


def _sizes(
    region: Region,
    projections: Mapping[str, Projections],
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
) -> dict[int, list[int]]:
    """The numbers that may stand for heads in a region, and what each may have become."""
    inside = {name: taken for name, taken in sliced.items() if region.holds(name)}
    becomes: dict[int, list[int]] = {}
    for name in region.sites:
        for before, after in possible_sizes(projections[name], arrangement, inside).items():
            becomes[before] = list(dict.fromkeys([*becomes.get(before, []), *after]))
    return becomes


def _sources(
    region: Region, projections: Mapping[str, Projections], arrangement: Arrangement
) -> dict[int, list[int]]:
    """For the number of heads, and of key heads, which of them those after the change come from."""
    sources: dict[int, list[int]] = {}
    for name in region.sites:
        site = projections[name].site
        heads, key_heads = arrangement.heads(name), arrangement.key_heads(name)
        if len(heads) != site.heads:
            sources[site.heads] = heads
        if len(key_heads) != len(set(site.kv_heads)):
            sources.setdefault(len(set(site.kv_heads)), key_heads)
    return {size: heads for size, heads in sources.items() if size > 1 and heads}


def _weights(region: Region, projections: Mapping[str, Projections]) -> set[str]:
    """The parameters and buffers of a region that gradients account for, by their names in it."""
    names = {name for site in region.sites for name in projections[site].users}
    start = len(region.path) + 1 if region.path else 0
    return {name[start:] for name in names if region.holds(name)}


def _ambiguous(
    region: Region,
    module: nn.Module,
    numbers: list[Candidate],
    chosen: dict[Candidate, object],
    holds: OutputCheck,
) -> bool:
    """Whether numbers that split axes, or per-head settings, give the same output unchanged and changed."""
    values = Values(module, numbers)
    try:
        for candidate in numbers:
            if candidate in chosen or not (candidate.axes or candidate.key in region.split):
                continue
            for option in candidate.options:
                if option is not candidate.old and not (
                    candidate.axes and begins_alike(candidate.old, option)
                ):
                    values.put(chosen | {candidate: option})
                    if holds():
                        return True
    finally:
        values.put(chosen)
    return False


def _from_noise(
    model: nn.Module,
    region: Region,
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
    numbers: list[Candidate],
    values: Values,
    holds: OutputCheck,
) -> dict[Candidate, object]:
    """The changes found with noise in weights and inputs, where those alone do not show them.

    Raises
    ------
    ValueError when that does not show it either.
    """
    values.put({})
    noisy = with_noise(model, values.region, region, arrangement, sliced)
    chosen = (
        None if noisy is None else search_numbers(noisy[0], numbers, OutputCheck(*noisy, holds.allowed), {})
    )
    if noisy is not None and chosen is not None:
        left = [c for c in numbers if c.axes and c not in chosen]
        twin = OutputCheck(*noisy, holds.allowed)
        if not _ambiguous(region, noisy[0], left, chosen, twin):
            values.put(chosen)
            if holds():
                return chosen
    values.put({})
    unclear = [c.name for c in numbers if c.axes or c.key in region.split]
    raise ValueError(
        f"heads: cannot {arrangement.verb} at {region.sites[0]!r}: a batch of length {region.length} does "
        f"not show whether {' or '.join(unclear)} depends on the number of heads; give a longer batch, or "
        "train the model first"
    )


def _check_lengths(
    region: Region, chosen: Mapping[Candidate, object], arrangement: Arrangement, changes: Changes
) -> None:
    """Refuse to change numbers that may be lengths and exceed every sequence that was run."""
    for candidate in chosen:
        if candidate.axes or candidate.key in region.split:
            continue
        if candidate.old >= region.length:
            raise ValueError(
                f"heads: cannot {arrangement.verb} at {region.sites[0]!r}: {candidate.name} = "
                f"{candidate.old} would have to change, and no batch longer than {region.length} could be "
                "made to show that it is not a length; give a longer batch"
            )
        if region.length <= _WIDELY * candidate.old:
            changes.notes.append(
                f"{region.sites[0]}: {candidate.name} = {candidate.old} was changed, and held to sequences "
                f"of at most {region.length}"
            )


def _widths(
    copied: nn.Module, region: Region, projections: Mapping[str, Projections], arrangement: Arrangement
) -> list[dict[str, Width]]:
    """The widths to report to modules that read the width of all heads off their input: none, or the
    width that they have now, for the modules of the sites or for the whole region.
    """
    choices: list[dict[str, Width]] = [{}, {}, {}]
    for name in region.sites:
        of_site = projections[name]
        heads = len(arrangement.heads(name))
        for path, start in ((of_site.site.path, 1), (region.path, 2)):
            reported = width_of(copied.get_submodule(path))
            before = reported.before if reported is not None else of_site.site.heads * of_site.d_value
            for choice in choices[start:]:
                choice[path] = Width(before, heads * of_site.d_value)
    return choices if choices[1].keys() != choices[2].keys() else choices[:2]


def _note(
    changes: Changes,
    path: str,
    sites: list[str],
    modules: Mapping[str, nn.Module],
    chosen: Mapping[Candidate, object],
    sources: Mapping[int, list[int]],
) -> None:
    """Record the changes in a region; for the modules of its sites also that nothing changed."""
    for name in sites:
        changes.attributes.setdefault(name, {})
    for candidate, value in chosen.items():
        where, name = _joined(path, candidate.module), ".".join(candidate.path)
        if candidate.axes:
            number = next(i for i, option in enumerate(candidate.options) if option is value)
            axis, size = candidate.axes[number - 1]
            changes.follow(where, name, axis, size, sources[size])
        else:
            changed = changes.configs if candidate.config else changes.attributes
            changed.setdefault(where, {})[name] = value
    for name, module in modules.items():
        if isinstance(module, TorchAttention):
            changes.attributes.setdefault(_joined(path, name), {})["kept"] = module.kept


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class OutputCheck:
    """Whether the output of a module is the expected one."""

    def __init__(self, module: nn.Module, calls: list[Captured], allowed: float) -> None:
        self.module, self.calls, self.allowed = module, calls, allowed

    def __call__(self) -> bool:
        try:
            return all(off <= self.allowed for off in _differences(self.module, self.calls))
        except Exception:  # these numbers do not fit
            return False

    def fails(self) -> bool:
        """Whether it runs, and its output differs."""
        try:
            return any(off > self.allowed for off in _differences(self.module, self.calls))
        except Exception:
            return False


def _differences(module: nn.Module, calls: list[Captured]) -> Iterator[float]:
    for call in calls:
        with seeded_evaluation(module):
            args, kwargs = call.arguments()
            output = module(*args, **kwargs)
        yield relative_difference(compared_output(module, call.output), compared_output(module, output))


def _reason(module: nn.Module, calls: list[Captured]) -> str:
    try:
        off = max(_differences(module, calls))
    except Exception as error:
        return describe_error(error)
    return f"its output is off by {off:.2g}"
