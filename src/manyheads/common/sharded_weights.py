"""Weights that several processes share (DTensor): FSDP2 gathers them for every call, tensor parallelism does
not, and each process then computes some of the heads. Under pipeline parallelism a process has some layers.
"""

from __future__ import annotations

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of a tensor only.

    >>> is_sharded(nn.Linear(2, 3).weight)
    False
    """
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def sharded_module(model: nn.Module) -> str | None:
    """The path of a module with such weights, if there is one."""
    path: str
    for path, module in model.named_modules():
        if any(tensor is not None and is_sharded(tensor) for tensor in module._parameters.values()):
            return path
    return None


def layers_elsewhere(model: nn.Module) -> list[str]:
    """The paths of modules that another process computes (transformers' pipeline parallelism).

    >>> layers_elsewhere(nn.Linear(2, 3))
    []
    """
    stands_in = "PipelineIdentityLayer"  # transformers has these in the place of what is not here
    return [path for path, module in model.named_modules() if type(module).__name__ == stands_in]


def check_all_layers(model: nn.Module) -> None:
    """Raise a ValueError for a model of which another process computes a part."""
    if elsewhere := layers_elsewhere(model):
        raise ValueError(
            f"model: {elsewhere[0]!r} is computed by another process (pipeline parallelism), so that what "
            "its heads do to the output is not seen here; watch counts the layers of each process: open the "
            "model without pp_size for the rest"
        )


def check_whole_heads(model: nn.Module) -> None:
    """Raise a ValueError for a model under tensor parallelism: its processes would number their heads from 0,
    and heads of several would be added up as one.
    """
    gathered: set[int] = set()
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            gathered.update(id(part) for part in module.modules())
    for path, module in model.named_modules():
        for tensor in module._parameters.values():
            if tensor is None or not is_sharded(tensor):
                continue
            mesh = getattr(tensor, "device_mesh", None)
            if id(module) not in gathered or getattr(mesh, "ndim", 1) > 1:
                raise ValueError(
                    f"model: the weights of {path!r} are spread over processes (tensor parallelism), each of "
                    "which computes some of the heads and would number them from 0; open the model without "
                    "tp_plan: with FSDP2, a device map or offload every process sees all heads"
                )
