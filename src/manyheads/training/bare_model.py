"""A model as a hand-written training loop has it: compiled, or fed by a loss function that only it knows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.capture.proof import forget
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.training.compiled import uncompiled
from manyheads.training.head_costs import Loss

ROWS = 3  # of a batch suffice to find out which weights belong to which head


def bare(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """The model itself, without the wrapper of torch.compile; its parameters must be the optimiser's.

    >>> layer = nn.Linear(2, 3)
    >>> bare(layer, torch.optim.SGD(layer.parameters(), lr=0.1)) is layer
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"model: got it wrapped in {type(model).__name__}, which cannot follow a change of heads; pass "
            "the model itself, and wrap it again whenever step() returns something"
        )
    model = getattr(model, "_orig_mod", model)
    optimizer_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimizer_ids]
    if missing:
        share = "none" if len(missing) == len(names) else f"{len(names) - len(missing)} of {len(names)}"
        raise ValueError(
            f"optimizer: it holds {share} of the model's trainable parameters, {missing[0]} not among them; "
            "expected the optimiser that trains this model, as torch.optim.AdamW(model.parameters())"
        )
    return model


def input_of(model: nn.Module, loss: Loss, batch: object) -> Batch:
    """A small input of the model: the first rows of what the loss passes to it.

    >>> layer = nn.Linear(2, 3)
    >>> input_of(layer, lambda model, batch: model(batch["x"]).sum(), {"x": torch.zeros(7, 2)})[0].shape
    torch.Size([3, 2])
    """
    calls: list[Batch] = []

    def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not calls:
            calls.append(_by_name(module, args, kwargs))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with evaluating(model), torch.no_grad():
            loss(model, batch)
    finally:
        handle.remove()
    if not calls:
        raise ValueError("loss: it did not call the model, as model(batch); expected a function of both")
    fewer = _first_rows(calls[0])
    try:
        with evaluating(model), torch.no_grad():
            run(model, fewer)
    except Exception:  # whatever it is: the first axis is not the batch
        return calls[0]
    return fewer


def _by_name(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Batch:
    """The arguments of a call as one batch."""
    if not kwargs:
        return args
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    by_name: dict[str, object] = {}
    kinds = inspect.signature(module.forward).parameters
    for name, value in bound.items():
        by_name |= value if kinds[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return by_name


def _first_rows(batch: Batch) -> Batch:
    """The first rows of every tensor, where all have as many."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [value for value in values if isinstance(value, Tensor)]
    sizes = {value.shape[0] if value.dim() else 0 for value in tensors}
    if len(sizes) != 1 or min(sizes) <= ROWS:
        return batch
    if isinstance(batch, Mapping):
        return {name: v[:ROWS] if isinstance(v, Tensor) else v for name, v in batch.items()}
    return tuple(v[:ROWS] if isinstance(v, Tensor) else v for v in batch)


@contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """A context in which a model runs as its class says: not compiled in place (`nn.Module.compile`), and not
    in the mixed precision that Accelerate puts around its forward.
    """
    wrapped = model.__dict__.pop("forward", None) if "_original_forward" in model.__dict__ else None
    if wrapped is not None:
        forget(model)  # in mixed precision, nothing is proved of its heads
    try:
        with uncompiled(model):
            yield
    finally:
        if wrapped is not None:
            model.__dict__["forward"] = wrapped
            forget(model)
