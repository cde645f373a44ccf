"""How large the gradient of each block of a model is: whether the loss reaches the first blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.nn.blocks import TransformerBlock
from manyheads.training.task import Data, Task


def first_batch(task: Task, data: Data, examples: int, seed: int) -> dict[str, Tensor]:
    """A batch of the training examples, the same for every model of a seed."""
    random = torch.Generator().manual_seed(seed)
    indices = torch.randperm(len(data.train), generator=random)[:examples].tolist()
    return task.collate(data.train.take(indices, seed))


def block_gradients(task: Task, model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """The norm of the gradient of all parameters of each block, from the first block to the last.

    >>> from manyheads.studies.fitting import new_model
    >>> from manyheads.studies.language_text import opened
    >>> task, data = opened(None, context=16)
    >>> task.d_model, task.layers = 8, 3
    >>> len(block_gradients(task, new_model(task, 0), first_batch(task, data, 2, seed=0)))
    3
    """
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    summed, count = task.loss(model, batch)
    parameters = [list(block.parameters()) for block in blocks]
    gradients = iter(torch.autograd.grad(summed / count, [p for group in parameters for p in group]))
    return [
        float(torch.stack([next(gradients).double().square().sum() for _ in group]).sum().sqrt())
        for group in parameters
    ]
