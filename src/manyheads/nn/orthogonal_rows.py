"""Weights whose heads have orthogonal rows: a parametrisation of torch, and how it folds away.

`manyheads.training.orthogonal_heads` says which rows of which weights are those of heads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from manyheads.common.devices import in_float64

# Singular values below this share of the largest do not let gradients grow further.
SMALLEST = 1e-5


class _Polar(torch.autograd.Function):
    """The nearest matrix with orthonormal rows; torch's own gradient of an SVD is infinite where two singular
    values are equal, which this function of them does not mind.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        ctx.save_for_backward(u, s, vh)
        return u @ vh  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        u, s, vh = ctx.saved_tensors
        least = SMALLEST * s[0].clamp(min=torch.finfo(s.dtype).tiny)
        rows = u.T @ gradient  # (rows, columns)
        inside = rows @ vh.T
        sums = s[:, None] + s
        turned = (inside - inside.T) * sums / (sums.square() + least.square())
        outside = (rows - inside @ vh) * (s / (s.square() + least.square()))[:, None]
        return u @ (turned @ vh + outside)  # type: ignore[no-any-return]


def polar(matrix: Tensor) -> Tensor:
    """The matrix with orthonormal rows that is nearest to ``matrix`` (rows, columns), rows <= columns.

    It has them whatever the matrix is, also where rows depend on each other.

    >>> polar(torch.tensor([[3.0, 0.0], [0.8, 0.6]]))
    tensor([[ 0.9762, -0.2169],
            [ 0.2169,  0.9762]])
    """
    return _Polar.apply(matrix)  # type: ignore[no-any-return]


def orthogonal_blocks(rows: Tensor) -> Tensor:
    """The blocks (heads, width, columns), each projected to a subspace of its own, orthogonal to all others.

    The subspaces are those of the nearest matrix with orthonormal rows, after each block was divided by its
    norm, so that none counts more than another. Blocks that are orthogonal already stay as they are. What a
    block is inside of its subspace, its scale among it, stays its own.

    >>> orthogonal_blocks(torch.tensor([[[2.0, 0.0]], [[0.6, 0.8]]]))  # two heads, one row each
    tensor([[[ 1.8000, -0.6000]],
    <BLANKLINE>
            [[ 0.3000,  0.9000]]])
    """
    heads, width, columns = rows.shape
    sizes = torch.linalg.vector_norm(rows, dim=(1, 2), keepdim=True)
    shares = rows / torch.where(sizes > 0, sizes, 1.0)
    basis = polar(shares.reshape(heads * width, columns)).view(heads, width, columns)
    return rows @ basis.mT @ basis


class OrthogonalRows(nn.Module):
    """A parametrisation of a weight, for `torch.nn.utils.parametrize`: the rows of its heads are orthogonal.

    groups: along which axis, and which indices are those of each head, for everything that is to be
        orthogonal; one weight may hold queries and keys.
    order: the names of the module's parameters, in the order that folding puts back.

    >>> weight = nn.Linear(5, 4)
    >>> _ = parametrize.register_parametrization(weight, "weight", OrthogonalRows([(0, [[0, 1], [2, 3]])]))
    >>> (weight.weight[:2] @ weight.weight[2:].T).abs().max().item() < 1e-6
    True
    """

    def __init__(
        self, groups: Sequence[tuple[int, Sequence[Sequence[int]]]], order: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.order = tuple(order)
        self.groups = [(axis, torch.tensor(heads)) for axis, heads in groups]  # (heads, width) each

    def forward(self, weight: Tensor) -> Tensor:
        # Unseen by what looks on: these are no functions of the model, and a weight like another comes out.
        with torch._C.DisableTorchFunction():
            return self._constrained(weight)

    def _constrained(self, weight: Tensor) -> Tensor:
        for axis, heads in self.groups:
            index = heads.flatten().to(weight.device)
            chosen = weight.index_select(axis, index).movedim(axis, 0)  # (heads * width, ...)
            rows = in_float64(chosen.flatten(1)).unflatten(0, tuple(heads.shape))
            with torch.autocast(rows.device.type, enabled=False):
                blocks = orthogonal_blocks(rows)
            back = blocks.flatten(0, 1).to(weight.dtype).to(weight.device).view(chosen.shape)
            weight = weight.index_copy(axis, index, back.movedim(0, axis))
        return weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What to keep so that ``weight`` comes out, if it is orthogonal."""
        return weight


def constrained(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules with orthogonal heads, and the names of their weights."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrisations: Any = module.parametrizations
            for name, functions in parametrisations.items():
                if any(isinstance(function, OrthogonalRows) for function in functions):
                    yield module, name


def without_constraints(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, but for those that only compute orthogonal weights."""
    computing: set[int] = set()
    for module, name in constrained(model):
        parametrisations: Any = module.parametrizations
        computing |= {id(parametrisations), *(id(part) for part in parametrisations[name].modules())}
    return [module for module in model.modules() if id(module) not in computing]


@torch.no_grad()
def fold_orthogonal(model: nn.Module) -> nn.Module:
    """Turn the weights that `orthogonal_heads` constrains into plain ones: still orthogonal, but free from
    now on.

    Parameters
    ----------
    model: a model after `orthogonal_heads`; it is changed, and its parameters stay the same objects, so that
        an optimiser can continue with them. A model without constraints stays as it is.

    Returns
    -------
    The model.

    See Also
    --------
    orthogonal_heads : the constraint.
    save, cut : do this automatically, on a copy.

    References
    ----------
    Li et al. 2018, Multi-head attention with disagreement regularization.

    Examples
    --------
    >>> import manyheads as mh
    >>> layer = mh.MultiHeadAttention(6, heads=3)
    >>> x = torch.randn(2, 5, 6)
    >>> out = mh.orthogonal_heads(layer, batch=x)(x)
    >>> "weight" in dict(layer.query.named_parameters())
    False
    >>> torch.equal(mh.fold_orthogonal(layer)(x), out)
    True
    >>> "weight" in dict(layer.query.named_parameters())
    True
    """
    for module, name in list(constrained(model)):
        value = getattr(module, name).detach()
        original, order = _unconstrain(module, name)
        original.copy_(value)
        _put(module, name, original, order)
    return model


@torch.no_grad()
def plain(model: nn.Module) -> nn.Module:
    """The model, or where it has orthogonal heads a copy with plain weights.

    >>> layer = nn.Linear(2, 3)
    >>> plain(layer) is layer
    True
    """
    return model if next(constrained(model), None) is None else replace_constrained(copy.deepcopy(model))


@torch.no_grad()
def replace_constrained(model: nn.Module) -> nn.Module:
    """Give a copy, which may share its parameters, plain weights of its own where it has orthogonal heads."""
    for module, name in list(constrained(model)):
        value = getattr(module, name).detach().clone()
        original, order = _unconstrain(module, name)
        _put(module, name, nn.Parameter(value, original.requires_grad), order)
    return model


def _put(module: nn.Module, name: str, parameter: nn.Parameter, order: Sequence[str]) -> None:
    module.register_parameter(name, parameter)
    for other in [key for key in order if key in module._parameters]:
        module._parameters[other] = module._parameters.pop(other)


def _unconstrain(module: nn.Module, name: str) -> tuple[nn.Parameter, Sequence[str]]:
    """Take the constraint off a module, and return what its weight was computed from, and the order of its
    parameters. torch's own removal takes it off the class, which copies of the module share.
    """
    parametrisations: Any = module.parametrizations
    original: nn.Parameter = parametrisations[name].original
    order = next(
        constraint.order for constraint in parametrisations[name] if isinstance(constraint, OrthogonalRows)
    )
    kind = type(module)
    if len(parametrisations) > 1:  # the others need a class that still has their properties, and not this one
        rest = {key: value for key, value in vars(kind).items() if key != name}
        module.__class__ = type(kind.__name__, kind.__bases__, rest)
        del parametrisations[name]
    else:
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module.parametrizations
    return original, order
