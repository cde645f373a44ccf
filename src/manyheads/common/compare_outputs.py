"""What modules were given and gave, and how far apart two outputs are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common import preserved_state

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass
class Captured:
    """What a module was given and what it gave, in the silenced model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    handed: dict[str | int, str] = field(default_factory=dict)  # arguments that another of the modules gave

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, copied: caches change when they are used."""
        return copy.deepcopy((self.args, self.kwargs))


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in an output, with where they are; no attention weights and no caches."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not re.search("past|cache|attentions", str(key)):
                yield from tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from tensors(item, f"{name}[{place}]")


def difference(wanted: Any, got: Any) -> float:
    """How far two outputs are apart, relative to the largest number, or 1 if that is larger.

    The first tensors must be of one shape; others that are not (weights of each head) do not count.
    """
    worst, first = 0.0, True
    for (_, a), (_, b) in zip(tensors(wanted), tensors(got), strict=False):
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
    """Eval mode without gradients, and always the same random numbers, for models that draw some then, too.

    Afterwards every module is as it was, and so are the generators.
    """
    with preserved_state.evaluating(model), torch.no_grad():
        torch.manual_seed(0)
        yield


def tolerance(model: nn.Module) -> float:
    """How far outputs may be apart, by the least exact dtype of the weights."""
    found = {parameter.dtype for parameter in model.parameters()}
    return max((TOLERANCE[dtype] for dtype in found if dtype in TOLERANCE), default=1e-5)
