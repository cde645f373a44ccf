"""All hand-written modules of the zoo, by theme: importing the themes puts them into `CASES`."""

from __future__ import annotations

from tests.zoo import (
    axes,
    blocks,
    calls,
    flows,
    grouped,
    masks,
    mixers,
    models,
    opaque,
    padding,
    scores,
    weights,
)
from tests.zoo.base import CASES

THEMES = (axes, weights, scores, masks, padding, grouped, calls, blocks, flows, models, opaque, mixers)

__all__ = ["CASES", "THEMES"]
