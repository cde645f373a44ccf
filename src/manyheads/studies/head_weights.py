"""The weights of our own attention modules, head by head: to make heads equal, and to see how they differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.nn.multihead import MultiHeadAttention


def attentions(model: nn.Module) -> list[MultiHeadAttention]:
    """The attention modules of a model, in order.

    >>> from manyheads.nn.transformers import Decoder
    >>> len(attentions(Decoder(12, heads=3, layers=2, vocabulary=101)))
    2
    """
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def by_head(module: MultiHeadAttention, gradients: bool = False) -> list[Tensor]:
    """Views (heads, ...) of the weights that belong to one head each, or of their gradients; the output's
    bias belongs to none.

    >>> [tuple(view.shape) for view in by_head(MultiHeadAttention(12, heads=3, bias=False))]
    [(3, 4, 12), (3, 4, 12), (3, 4, 12), (3, 12, 4)]
    """
    views = []
    for projection in (module.query, module.key, module.value):
        parameters = (part for part in (projection.weight, projection.bias) if part is not None)
        views += [_tensor(part, gradients).unflatten(0, (module.heads, -1)) for part in parameters]
    output = _tensor(module.output.weight, gradients)
    return [*views, output.unflatten(1, (module.heads, -1)).transpose(0, 1)]


def _tensor(parameter: Tensor, gradient: bool) -> Tensor:
    if not gradient:
        return parameter.detach()
    if parameter.grad is None:
        raise ValueError("gradients: the weights have none; run backward first")
    return parameter.grad


@torch.no_grad()
def make_equal(model: nn.Module, noise: float = 0.0, seed: int = 0) -> None:
    """Give all heads of a layer the weights of its first, plus noise relative to the size of the weights.

    What h equal heads write adds up to h times the same, not to sqrt(h) times as much as that of random
    heads: the output's columns are divided by sqrt(h), so that the layer's output is as large as before.

    >>> module = MultiHeadAttention(12, heads=3)
    >>> make_equal(module)
    >>> weight_spread(module)
    0.0
    """
    random = torch.Generator().manual_seed(seed)
    for module in attentions(model):
        *inputs, output = by_head(module)
        for view in (*inputs, output):
            size = view[0].std() if view[0].numel() > 1 else view[0].abs().max()
            first = view[:1].expand_as(view) + noise * size * torch.randn(view.shape, generator=random)
            view.copy_(first)
        output /= module.heads**0.5


def weight_spread(model: nn.Module) -> float:
    """How far the weights of a layer's heads are from their mean, relative to their size: 0 for equal heads,
    sqrt(1 - 1/h) for random ones; the mean over layers.

    >>> 0.7 < weight_spread(MultiHeadAttention(64, heads=2)) < 0.72
    True
    """
    spreads = []
    for module in attentions(model):
        weights = torch.cat([view.flatten(1).double() for view in by_head(module)], 1)
        # about the first head, so that equal heads give exactly zero
        shift = weights - weights[:1]
        spreads.append(float((shift - shift.mean(0)).norm() / weights.norm()))
    return sum(spreads) / len(spreads)
