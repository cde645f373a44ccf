"""The weights are never held: the largest memory in use stays far below one (queries, keys) square."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from manyheads.nn import block_statistics, fused, mask, tile_statistics, tiles
from manyheads.nn.attention import attention
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.statistics import statistics

LENGTH, HEADS, WIDTH = 1021, 4, 8
SQUARE = LENGTH * LENGTH * 4  # bytes of one head's weights
LIMIT = 0.75 * SQUARE  # all heads' weights are four squares, and several of them when training


def peak(run) -> int:
    """The most bytes that were in use at once while ``run()`` ran, beyond what was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    used = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        most = max(most, used)
    return most


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Blocks and tiles far smaller than the square: what then still grows with it is a mistake."""
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 2**14)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**15)
    monkeypatch.setattr(tile_statistics, "ELEMENTS", 2**15)
    monkeypatch.setattr(block_statistics, "ELEMENTS", 2**15)
    monkeypatch.setattr(block_statistics, "ROWS", 64)


def tensors(queries=LENGTH, keys=LENGTH, d_value=WIDTH, kv_heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, queries, WIDTH), (kv_heads, keys, WIDTH), (kv_heads, keys, d_value)
    return [torch.randn(1, *size, generator=generator) for size in sizes]


def trained(inputs, **options):
    def run():
        leaves = [x.detach().requires_grad_() for x in inputs]
        attention(*leaves, **options).sum().backward()

    return run


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "dropout": {"dropout": 0.1},
    "dropout, causal": {"dropout": 0.1, "causal": True},
    "window": {"window": 50},
    "causal window": {"window": 50, "causal": True},
    "chunk": {"chunk": 100},
    "padding": {"mask": mask.padding(torch.tensor([700]))},
    "padding everywhere": {"mask": mask.padding(torch.tensor([700]), queries=torch.tensor([700]))},
    "alibi": {"mask": mask.alibi(HEADS), "causal": True},
    "bias of keys": {"mask": torch.zeros(LENGTH)},
    "dropout and alibi": {"dropout": 0.1, "mask": mask.alibi(HEADS)},
}


def test_the_reference_does_hold_them():
    """Otherwise this file measures nothing."""
    assert peak(trained(tensors(), kernel="reference")) > HEADS * SQUARE


@pytest.mark.parametrize("case", CASES)
def test_training(case):
    assert peak(trained(tensors(), **CASES[case])) < LIMIT


@pytest.mark.parametrize("d_value", [3, 13])
def test_values_of_another_width(d_value):
    assert peak(trained(tensors(d_value=d_value), causal=True)) < LIMIT


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"dropout": 0.1}], ids=str)
def test_causal_with_a_cache_of_earlier_keys(options):
    inputs = tensors(queries=800, keys=1500, kv_heads=2)
    assert peak(trained(inputs, causal=True, **options)) < LIMIT


@pytest.mark.parametrize("shape", [(LENGTH,), (HEADS, 1, LENGTH), (HEADS, LENGTH, 1)])
def test_a_learned_bias(shape):
    bias = torch.zeros(shape, requires_grad=True)
    assert peak(trained(tensors(), mask=bias)) < LIMIT


def test_a_learned_bias_of_every_pair_costs_itself_and_its_gradient():
    bias = torch.zeros(LENGTH, LENGTH, requires_grad=True)
    assert peak(trained(tensors(), mask=bias, causal=True)) < 2.5 * SQUARE  # not HEADS * SQUARE


@pytest.mark.parametrize("given", [None, "padding", "alibi"])
@pytest.mark.parametrize("which", ["core", "full"])
def test_statistics(which, given):
    q, k, _ = tensors()
    masks = {"padding": mask.padding(torch.tensor([700])), "alibi": mask.alibi(HEADS), None: None}
    features = torch.ones(1, LENGTH, 2)
    options = {"mask": masks[given], "statistics": which, "features": features}
    assert peak(lambda: statistics(q, k, **options)) < LIMIT
    assert peak(lambda: statistics(q, k, causal=True, **options)) < LIMIT


def test_module_with_statistics():
    module = MultiHeadAttention(HEADS * WIDTH, HEADS, dropout=0.1)
    x = torch.randn(1, LENGTH, HEADS * WIDTH)

    def run():
        out, _ = module(x, causal=True, return_statistics="full")
        out.sum().backward()

    assert peak(run) < LIMIT
