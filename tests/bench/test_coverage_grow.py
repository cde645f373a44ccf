"""bench.coverage_grow: what is grown, and how misses are told."""

from __future__ import annotations

import torch
from torch import nn

import manyheads as mh
from bench import coverage_grow
from manyheads.capture.site import Site


def test_whole_groups_and_one_head_for_every_group_take_turns():
    groups = (0, 0, 0, 1, 1, 1)
    sites = [
        Site("a", 0, 6, groups),
        Site("a#2", 1, 6, groups),
        Site("b", 2, 6, groups),
        Site("c", 3, 2, (0, 1)),
    ]
    assert coverage_grow.choose(sites) == {"a": 3, "a#2": 3, "b": 2, "c": 1}


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.output = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*x.shape[:2], 3, 2).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        return self.output(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_what_grows_and_what_does_not():
    x = torch.randn(2, 5, 6)
    results = {
        "ours": coverage_grow.grow(mh.MultiHeadAttention(6, heads=3).eval(), (x,)),
        "stubborn": coverage_grow.grow(nn.Sequential(Stubborn()).eval(), (x,)),
        "not cut": {"status": "failed", "reason": ""},
    }
    assert results["ours"] == {"status": "grown", "reason": ""}
    assert results["stubborn"]["status"] == "failed"
    assert results["stubborn"]["reason"].startswith("zero: grow: 0 (Stubborn) with 1 more head")
    cut = {"ours": {"status": "cut"}, "stubborn": {"status": "cut"}, "not cut": {"status": "refused"}}
    text = coverage_grow.report(results, cut)
    assert "1 of 2 architectures that were tried, of 2 that are cut, grow" in text
    assert "- stubborn (failed): zero: grow: 0 (Stubborn)" in text
    assert "NOT REACHED" in text
