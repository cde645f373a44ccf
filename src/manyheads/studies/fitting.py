"""Training in memory, for studies: a model of a task, some steps, the metrics on held-out examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.common.preserved_state import seed_generators
from manyheads.data.examples import Order, spread
from manyheads.models.config import build
from manyheads.training.evaluation import evaluate
from manyheads.training.task import Data, Task

OnStep = Callable[[int, nn.Module], None]
Surgery = Callable[[int, nn.Module, Optimizer], None]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, a linear warm-up, then a cosine."""

    steps: int = 300
    batch_tokens: int = 1024
    learning_rate: float = 2e-3
    warmup: int = 30
    clip: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)


@dataclass
class Fit:
    """A trained model, and the loss of every step per predicted token."""

    task: Task
    data: Data
    model: nn.Module
    losses: list[float] = field(default_factory=list)

    def metrics(self, examples: int = 256) -> dict[str, float]:
        """The task's metrics on some held-out examples, evenly spread; 0 for all."""
        valid = self.data.valid
        return evaluate(self.task, self.model, valid, spread(len(valid), examples))

    def final_loss(self, share: float = 0.1) -> float:
        """The mean loss of the last steps."""
        last = self.losses[-max(1, round(share * len(self.losses))) :]
        return sum(last) / len(last)


def new_model(task: Task, seed: int) -> nn.Module:
    """A new model of a task; the task must have opened its data."""
    seed_generators(seed)
    return build(task.describe())


def fit(
    task: Task,
    data: Data,
    model: nn.Module,
    recipe: Recipe,
    seed: int,
    *,
    after_backward: OnStep | None = None,
    after_step: OnStep | None = None,
    surgery: Surgery | None = None,
    term: Callable[[], Tensor] | None = None,
) -> Fit:
    """Train a model in place.

    Parameters
    ----------
    task, data: what to learn; ``data`` is what the task opened.
    model: see `new_model`. It may have been changed.
    recipe, seed: how, and in which order the examples come.
    after_backward, after_step: called with the number of the step and the model, when it has gradients and
        when it was updated.
    term: gives what is added to the loss of every step.
    surgery: called then, too, with the optimiser: it may change the model in place.

    Examples
    --------
    >>> from manyheads.tasks.language import Language
    >>> task = Language(context=16, d_model=8, heads=2, layers=1)
    >>> data = task.open(None)
    >>> result = fit(task, data, new_model(task, 0), Recipe(steps=2, batch_tokens=64), seed=0)
    >>> len(result.losses), sorted(result.metrics(examples=2))
    (2, ['bits_per_byte', 'loss', 'perplexity'])
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay,
        fused=True,
    )  # fmt: skip
    order = Order(data.train.sizes, recipe.batch_tokens, seed)
    seed_generators(seed)
    model.train()
    fitted = Fit(task, data, model)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, recipe)
        batch = task.collate(data.train.take(order.batch(step), seed, step))
        summed, count = task.loss(model, batch)
        loss = summed / count
        optimizer.zero_grad()
        (loss if term is None else loss + term()).backward()
        if after_backward is not None:
            after_backward(step, model)
        if recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        fitted.losses.append(float(loss.detach()))
        if after_step is not None:
            after_step(step, model)
        if surgery is not None:
            surgery(step, model, optimizer)
    model.eval()
    return fitted


def _rate(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1)
    return (1 + math.cos(math.pi * done)) / 2
