"""Arguments and outputs of modules, and the difference between two outputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyheads.common import preserved_state

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass
class Captured:
    """A call of a module in the silenced model: its arguments and its output.

    ``producers`` names the arguments that are outputs of another of the modules, and that module.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object = None
    producers: dict[str | int, str] = field(default_factory=dict)

    def arguments(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments, copied: caches change when they are used."""
        return copy.deepcopy((self.args, self.kwargs))


def tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in an output, with their paths; no attention weights and no caches."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not re.search("past|cache|attentions", str(key)):
                yield from tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}[{index}]")


def relative_difference(expected: object, actual: object) -> float:
    """The largest difference of two outputs, relative to the largest number, or to 1 if that is larger.

    The first tensors must have the same shape; others that do not (weights of each head) do not count.
    """
    worst, first = 0.0, True
    for (_, a), (_, b) in zip(tensors(expected), tensors(actual), strict=False):
        if a.shape == b.shape and a.numel():
            finite = a.isfinite()
            if not torch.equal(finite, b.isfinite()):
                return float("inf")
            exact = torch.promote_types(a.dtype, torch.float32)
            a, b = (x.detach().to(exact) for x in (a, b))
            if not bool(finite.all()):
                a, b = a[finite], b[finite]
            if a.numel():
                worst = max(worst, float((a - b).abs().max()) / max(1.0, float(a.abs().max())))
        elif first:
            return float("inf")
        first = False
    return float("inf") if first else worst


@contextmanager
def seeded_evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, with a fixed seed, for models that draw random numbers in eval mode, too.

    Afterwards every module and every random generator is as it was.
    """
    with preserved_state.evaluating(model), torch.no_grad():
        preserved_state.seed_generators(0)
        yield


def tolerance(model: nn.Module) -> float:
    """The tolerance for outputs, by the least exact dtype of the weights."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=1e-5)
