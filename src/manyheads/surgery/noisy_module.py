"""A module with noise in its weights and inputs, for what its own weights and inputs do not show.

A projection that begins as zeros, or an input of one token, gives the same whatever the heads are. With noise
in weights and inputs, a module and what became of it still have to agree, and show more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from manyheads.common.compare_outputs import Captured, seeded_evaluation
from manyheads.heads.silence import silence
from manyheads.models.changes import get_tensor, replace_module, set_tensor
from manyheads.models.torch_attention import TorchAttention
from manyheads.surgery.arrangement import Arrangement
from manyheads.surgery.regions import Region
from manyheads.surgery.weight_slices import Slice


def with_noise(
    model: nn.Module,
    changed: nn.Module,
    region: Region,
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
) -> tuple[nn.Module, list[Captured]] | None:
    """A copy of a region whose heads changed, with noise in its weights, and its expected outputs for noisy
    inputs; None where these cannot be computed.

    model: the model before. changed: the region whose heads changed.
    """
    prefix = f"{region.path}." if region.path else ""
    before, twin = copy.deepcopy(model.get_submodule(region.path)), copy.deepcopy(changed)
    for path, part in twin.named_modules():
        if isinstance(part, TorchAttention) and isinstance(before.get_submodule(path), nn.MultiheadAttention):
            before = replace_module(before, path, TorchAttention.like(before.get_submodule(path)))
    generator = torch.Generator().manual_seed(13)
    heads: dict[str, list[int]] = {}
    for name in region.sites:
        path = name.partition("#")[0]
        if name in arrangement.removed:
            heads["" if path == region.path else path.removeprefix(prefix)] = arrangement.removed[name]
    try:
        for name, parameter in list(before.named_parameters()):
            least = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            noisy = _noisy(parameter.detach(), least, generator)
            set_tensor(before, name, noisy)
            if prefix + name in sliced:
                noisy = sliced[prefix + name].of(noisy)
            if get_tensor(twin, name).shape != noisy.shape:
                return None
            set_tensor(twin, name, noisy)
        calls = []
        for call in region.calls:
            args, kwargs = tree_map_only(Tensor, lambda x: _input(x, generator), call.arguments())
            noised = Captured(args, kwargs)
            args, kwargs = noised.arguments()
            with seeded_evaluation(before), silence(before, heads, unverified="allow"):
                noised.output = before(*args, **kwargs)
            calls.append(noised)
    except Exception:  # its parts, or its inputs, are not like that
        return None
    return twin, calls


def _input(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or tensor.dim() < 3 or not tensor.numel() or float(tensor.min()) < -1e4:
        return tensor
    return _noisy(tensor, 1.0, generator)


def _noisy(tensor: Tensor, least: float, generator: torch.Generator) -> Tensor:
    """A tensor with noise as large as what is in it, or as ``least`` if that is larger."""
    scale = max(float(tensor.float().std()) if tensor.numel() > 1 else 0.0, least)
    return tensor + torch.randn(tensor.shape, generator=generator).to(tensor) * scale
