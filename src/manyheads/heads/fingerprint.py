"""A short name for a model with its weights, by which tables and plans know their model."""

from __future__ import annotations

import hashlib

from torch import nn

from manyheads.common.quantised import plain_parts
from manyheads.common.sharded_weights import is_sharded


def fingerprint(model: nn.Module) -> str:
    """A short name for a model with its weights: shapes, dtypes and a few numbers of every parameter that is
    in memory as a whole (not offloaded, not sharded).

    >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> fingerprint(a) == fingerprint(a), fingerprint(a) == fingerprint(b)
    (True, False)
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        name = ".".join(part for part in name.split(".") if part != "_orig_mod")
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        for part in () if is_sharded(parameter) else plain_parts(parameter):
            if part.numel() and part.device.type != "meta":
                corners = [[step * (size - 1) // 2 for size in part.shape] for step in (0, 1, 2)]
                digest.update(str([part[tuple(corner)].item() for corner in corners]).encode())
    return digest.hexdigest()[:16]


def check_plan_model(expected: str, model: nn.Module, advice: str) -> None:
    """Raise unless a plan was made for a model: ``expected`` is the fingerprint that the plan has noted."""
    actual = fingerprint(model)
    if actual != expected:
        raise ValueError(
            f"plan: it was made for the model {expected or 'unknown'}, and this one is {actual}: other "
            f"shapes or other weights; {advice}"
        )
