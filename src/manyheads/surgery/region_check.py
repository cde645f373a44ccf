"""Check a cut on disk module by module: each that lost heads, read back, against the silenced one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.common.compare_outputs import Captured, relative_difference, seeded_evaluation, tensors
from manyheads.common.errors import FailedChangeError, describe_error
from manyheads.common.interrupts import stop_if_interrupted
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.progress import Progress
from manyheads.heads.silence import silence
from manyheads.models.checkpoint import Checkpoint
from manyheads.models.per_head_inputs import arguments
from manyheads.surgery.large_model import LargeModel
from manyheads.surgery.rebuild import Rebuilt
from manyheads.surgery.small_twin import Scale
from manyheads.surgery.verify import compared_output

_ALLOWED = 1e-5  # everything is computed in float32


def check_regions(
    large: LargeModel,
    cut: nn.Module,
    written: Checkpoint,
    rebuilt: Rebuilt,
    scale: Scale,
    progress: Progress,
) -> float:
    """Raise unless every module of the cut model gives what the uncut one gives with its heads silenced.
    Returns the largest difference.

    Each is called as it was called in the small twin, on random numbers. One module is in memory at a time.

    large, cut: the structures of both. written: the tensors of the cut one.
    """
    arrangement = rebuilt.arrangement
    changed = [r for r in rebuilt.regions.values() if any(map(arrangement.changes, r.sites))]
    makers = {path for region in changed for path in region.calls[0].producers.values()}
    checked = [r for r in rebuilt.regions.values() if r in changed or r.path in makers]
    names = {name: name for name in written.entries}
    worst = 0.0
    outputs: dict[str, tuple[object, object]] = {}  # of those whose outputs others take
    for number, region in enumerate(checked):
        progress("check", number, len(checked))
        stop_if_interrupted()
        call = region.calls[0]
        sites = [arrangement.sites[name] for name in region.sites]
        heads = {_path_in_region(region.path, site): arrangement.removed.get(site.name, []) for site in sites}
        uncut_module = _load_module(large.model, region.path, large.checkpoint, large.names)
        cut_module = _load_module(cut, region.path, written, names)
        expected_call, actual_call = (
            _enlarge_arguments(call, scale, sites, _replacement_arguments(call, rebuilt, outputs, side))
            for side in (0, 1)
        )
        try:
            with seeded_evaluation(uncut_module), silence(uncut_module, heads, unverified="allow"):
                expected = uncut_module(*expected_call[0], **expected_call[1])
            with seeded_evaluation(cut_module):
                actual = cut_module(*actual_call[0], **actual_call[1])
        except Exception as error:
            raise FailedChangeError(
                f"cut: {region.path!r} could not be checked at full width ({describe_error(error)}); nothing "
                "was written"
            ) from error
        gap = relative_difference(compared_output(cut_module, expected), compared_output(cut_module, actual))
        if not gap <= _ALLOWED:
            raise FailedChangeError(
                f"cut: {region.path!r} of the cut model differs from the silenced one by {gap:.2g} (allowed: "
                f"{_ALLOWED:.0e}); nothing was written"
            )
        worst = max(worst, gap)
        if region.path in makers:
            outputs[region.path] = expected, actual
        del uncut_module, cut_module, expected, actual
        gc.collect()  # modules and their hooks hold each other: away with them before the next ones are read
    progress("check", len(checked), len(checked))
    return worst


def _path_in_region(path: str, site: Site) -> str:
    """The path of a site inside of the region at ``path``."""
    return site.path.removeprefix(path).removeprefix(".")


def _load_module(model: nn.Module, path: str, checkpoint: Checkpoint, names: dict[str, str]) -> nn.Module:
    """The module at this path with its weights, in float32."""
    module = copy.deepcopy(model.get_submodule(path))
    under = f"{path}." if path else ""
    for name in [name for name, _ in module.named_parameters()]:
        tensor = checkpoint.read(names[under + name])
        owner, _, key = name.rpartition(".")
        exact = tensor.float() if tensor.is_floating_point() else tensor.clone()
        module.get_submodule(owner)._parameters[key] = nn.Parameter(exact, requires_grad=False)
    return module.float().eval()


def _replacement_arguments(
    call: Captured, rebuilt: Rebuilt, outputs: dict[str, tuple[object, object]], side: int
) -> dict[str | int, Tensor]:
    """The arguments that another module made: its output here, at the position that it had in the twin."""
    values = dict(arguments(call.args, call.kwargs))
    replacements: dict[str | int, Tensor] = {}
    for argument, path in call.producers.items():
        value, source = values[argument], rebuilt.regions[path].calls[0].output
        for (_, twin_output), (_, large_output) in zip(
            tensors(source), tensors(outputs[path][side]), strict=False
        ):
            if (
                isinstance(value, Tensor)
                and twin_output.shape == value.shape
                and torch.equal(twin_output, value)
            ):
                replacements[argument] = large_output
    return replacements


def _enlarge_arguments(
    call: Captured, scale: Scale, sites: Iterable[Site], replacements: dict[str | int, Tensor]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a call in the twin at the widths of the large model, in float32."""
    args, kwargs = call.arguments()
    numbers = {number for site in sites for number in (site.heads, len(set(site.kv_heads)))}
    generator = torch.Generator().manual_seed(17)

    def enlarge(x: Tensor) -> Tensor:
        shape = [size if size in numbers or size % scale.small else scale.of(size) for size in x.shape]
        if not x.is_floating_point() or shape == list(x.shape):
            return x
        return torch.randn(shape, generator=generator)

    of_size: Callable[[object], object] = lambda value: map_tensors(enlarge, value)  # noqa: E731
    new_args = tuple(replacements.get(n, of_size(value)) for n, value in enumerate(args))
    return new_args, {name: replacements.get(name, of_size(value)) for name, value in kwargs.items()}
