"""The names of the statistics, random inputs, and a comparison with the formula."""

from __future__ import annotations

import torch

CORE = {"keys", "logsumexp", "entropy", "self", "previous", "next", "first"}
FULL = CORE | {"confidence", "collision", "distance", "distance_spread", "local", "largest_logit", "received"}


def random(shape, dtype=torch.float64, offset=0.0):
    batch, heads, kv_heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(batch, heads, queries, width, dtype=torch.float64, generator=generator)
    k = torch.randn(batch, kv_heads, keys, width, dtype=torch.float64, generator=generator) + offset
    features = torch.rand(batch, keys, 3, dtype=torch.float64, generator=generator)
    return q.to(dtype), k.to(dtype), features.to(dtype)


def same(found, expected, names, tolerance=1e-10):
    assert found.keys() == names
    for name in names:
        mine, wanted = found[name], expected[name]
        if name == "distance_spread" and tolerance < 1e-6:  # a root near zero: compare the variances
            mine, wanted = mine.square(), wanted.square()
        error = torch.where(mine == wanted, 0.0, (mine - wanted).abs())
        assert (error <= tolerance * (1 + wanted.abs())).all(), f"{name} is off by {error.max()}"
