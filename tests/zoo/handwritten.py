"""All hand-written modules of the zoo: importing the themes puts them into `CASES`."""

from __future__ import annotations

from tests.zoo import (
    axes,
    bands,
    biases,
    blocks,
    calls,
    flows,
    grouped,
    loops,
    masks,
    mixers,
    models,
    normalisation,
    opaque,
    order,
    origins,
    padding,
    paths,
    places,
    products,
    projections,
    reweighted,
    scores,
    weights,
)
from tests.zoo.base import CASES

THEMES = (
    axes, loops, weights, scores, masks, biases, padding, grouped, calls, blocks, bands, flows,
    projections, normalisation, products, origins, order, models, paths, places, opaque, mixers, reweighted,
)  # fmt: skip

__all__ = ["CASES", "THEMES"]
