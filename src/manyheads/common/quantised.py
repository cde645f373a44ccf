"""Linear maps with quantised weights: torchao's, bitsandbytes', or any other that keeps numbers packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from manyheads.common.sharded_weights import is_sharded

_PLAIN = {Tensor, nn.Parameter}


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors that a tensor is made of: itself, or what a subclass of torch.Tensor wraps.

    >>> len(list(plain_parts(torch.ones(2))))
    1
    """
    names = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in _PLAIN or names is None:
        yield tensor
        return
    for name in names()[0]:
        yield from plain_parts(getattr(tensor, name))


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weights are not plain numbers.

    >>> is_quantised(nn.Linear(2, 3))
    False
    """
    weight = getattr(module, "weight", None)
    if not (
        hasattr(module, "in_features") and hasattr(module, "out_features") and isinstance(weight, Tensor)
    ):
        return False
    if is_sharded(weight):
        return False
    foreign = type(module).__module__.partition(".")[0] == "bitsandbytes"
    return foreign or not weight.is_floating_point() or hasattr(weight, "__tensor_flatten__")


def quantised_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The quantised linear layers of a model, by path."""
    return {name: part for name, part in model.named_modules() if is_quantised(part)}


def replace_quantised(copied: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of a model with plain weights in the place of quantised ones. Each map of the model itself is
    asked what it makes of the unit vectors: those of bitsandbytes change what they share with a copy when
    they first run.
    """
    for name, part in quantised_modules(model).items():
        plain = _plain(part, _dtype(part, model))
        if not name:
            return plain
        holder, _, attribute = name.rpartition(".")
        setattr(copied.get_submodule(holder), attribute, plain)
    return copied


def _dtype(module: nn.Module, model: nn.Module) -> torch.dtype:
    """The dtype of what a quantised map reads: that of its weights, or of others where they are packed."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_floating_point():
        return weight.dtype
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and type(p) in _PLAIN)
    return next(dtypes, torch.float32)


@torch.no_grad()
def _plain(module: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """The linear layer of a quantised one."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    columns, rows = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    units = torch.eye(columns, dtype=dtype, device=weight.device)
    images = module.forward(units).detach()  # (columns, rows); without its hooks, which may be ours
    if isinstance(bias, Tensor):
        images = images - bias
    plain = nn.Linear(columns, rows, bias=isinstance(bias, Tensor), device="meta")
    plain.weight = nn.Parameter(images.T.contiguous().to(dtype), requires_grad=False)
    if isinstance(bias, Tensor):
        plain.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return plain


def without_gradient(model: nn.Module) -> str | None:
    """The path of a quantised map whose output has no gradient by its input, as where a package has a kernel
    for inference alone; None when there is none. One map of each class is tried.

    >>> without_gradient(nn.Linear(2, 3)) is None
    True
    """
    kinds = {type(part): (name, part) for name, part in quantised_modules(model).items()}
    for name, part in kinds.values():
        weight, dtype = part.weight, _dtype(part, model)
        assert isinstance(weight, Tensor)
        with torch.enable_grad():
            # with three axes, as models have them: bitsandbytes takes other kernels for two
            x = torch.zeros(2, 3, int(part.in_features), dtype=dtype, device=weight.device)  # type: ignore[arg-type]
            out = part.forward(x.requires_grad_())
            slope = torch.autograd.grad(out.sum(), x, allow_unused=True)[0] if out.requires_grad else None
            if slope is None or not bool(slope.any()):
                return name
    return None
