"""A module with noise in its weights and inputs, for what its own weights and inputs do not show.

A projection that begins as zeros, or an input of one token, gives the same whatever the heads are. With noise
in weights and inputs, the uncut module and what was cut from it still have to agree, and show more.
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
from manyheads.surgery.regions import Region, Removed
from manyheads.surgery.weight_slices import Shrink


def with_noise(
    model: nn.Module, small: nn.Module, region: Region, removed: Removed, shrunk: Mapping[str, Shrink]
) -> tuple[nn.Module, list[Captured]] | None:
    """A copy of a region that lost heads, with noise in its weights, and its expected outputs for noisy
    inputs; None where these cannot be computed.

    model: the uncut model. small: the region that lost heads.
    """
    prefix = f"{region.path}." if region.path else ""
    uncut, twin = copy.deepcopy(model.get_submodule(region.path)), copy.deepcopy(small)
    for path, part in twin.named_modules():
        if isinstance(part, TorchAttention) and isinstance(uncut.get_submodule(path), nn.MultiheadAttention):
            uncut = replace_module(uncut, path, TorchAttention.like(uncut.get_submodule(path)))
    generator = torch.Generator().manual_seed(13)
    heads: dict[str, list[int]] = {}
    for name in region.sites:
        path = name.partition("#")[0]
        if name in removed:
            heads["" if path == region.path else path.removeprefix(prefix)] = removed[name]
    try:
        for name, parameter in list(uncut.named_parameters()):
            least = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            noisy = _noisy(parameter.detach(), least, generator)
            set_tensor(uncut, name, noisy)
            shrink = shrunk.get(prefix + name)
            if shrink is not None:
                keep = torch.tensor(shrink.keep, dtype=torch.long, device=noisy.device)
                noisy = noisy.index_select(shrink.axis, keep)
            if get_tensor(twin, name).shape != noisy.shape:
                return None
            set_tensor(twin, name, noisy)
        calls = []
        for call in region.calls:
            args, kwargs = tree_map_only(Tensor, lambda x: _input(x, generator), call.inputs())
            noised = Captured(args, kwargs)
            args, kwargs = noised.inputs()
            with seeded_evaluation(uncut), silence(uncut, heads, unverified="allow"):
                noised.output = uncut(*args, **kwargs)
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
