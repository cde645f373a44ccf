"""Dropout on the attention weights: right on average, repeatable, and the same mask forward and backward.

With the identity as values the output is the dropped weights themselves, which shows which ones were kept.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import formula
from tests.helpers.kernels import KERNELS, random

from manyheads.nn import mask, tiles
from manyheads.nn.attention import attention

everywhere = pytest.mark.parametrize("kernel", KERNELS)


def factors(kernel, q, k, rate, seed=0, **options):
    """What each weight was multiplied with: 0, or about 1 / (1 - rate)."""
    keys = k.shape[2]
    identity = torch.eye(keys, dtype=q.dtype).expand(*k.shape[:2], keys, keys)
    torch.manual_seed(seed)
    dropped = attention(q, k, identity, dropout=rate, kernel=kernel, **options)
    whole = attention(q, k, identity, kernel="reference", **options)
    return torch.where(whole > 0, dropped / whole.clamp(min=1e-30), 0.0)


@pytest.mark.parametrize("rate", [0.1, 0.123456789, 0.5, 0.9, 0.003])
@everywhere
def test_kept_share_and_mean(kernel, rate):
    q, k, _ = random((2, 4, 2, 149, 149, 5, 5))
    kept = factors(kernel, q, k, rate)
    entries = kept.numel()
    spread = (rate * (1 - rate) / entries) ** 0.5
    assert abs((kept == 0).double().mean() - rate) < 5 * spread + 2**-16
    torch.testing.assert_close(
        kept[kept > 0], torch.full_like(kept[kept > 0], 1 / (1 - rate)), rtol=1e-3, atol=0
    )
    assert abs(kept.mean() - 1) < 5 * spread / (1 - rate)


@everywhere
def test_the_output_is_right_on_average(kernel):
    q, k, v = random((2, 2, 1, 7, 11, 3, 3))
    many = [x.repeat(2000, 1, 1, 1) for x in (q, k, v)]
    torch.manual_seed(1)
    out = attention(*many, dropout=0.3, kernel=kernel).unflatten(0, (2000, 2))
    expected = formula.attention(q, k, v, formula.allowed(7, 11))
    error = (out.mean(0) - expected).abs() / (out.std(0) / 2000**0.5)
    assert error.max() < 5


@everywhere
def test_weights_are_dropped_independently(kernel):
    q, k, _ = random((2, 4, 4, 101, 101, 5, 5))
    kept = factors(kernel, q, k, 0.5)
    x = (kept > 0).double() * 2 - 1
    for axis in range(4):
        for step in (1, 2, 4):
            if step < x.shape[axis]:
                a, b = x.narrow(axis, step, x.shape[axis] - step), x.narrow(axis, 0, x.shape[axis] - step)
                assert abs((a * b).mean()) < 5 / a.numel() ** 0.5, (axis, step)


@everywhere
def test_the_seed_decides(kernel):
    q, k, v = random((2, 4, 2, 37, 41, 5, 3))
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(attention(q, k, v, dropout=0.2, kernel=kernel))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)
    assert not torch.allclose(outs[0], outs[2])
    assert not torch.allclose(outs[2], attention(q, k, v, dropout=0.2, kernel=kernel))


@everywhere
def test_rate_zero_is_no_dropout_and_draws_nothing(kernel):
    q, k, v = random((2, 4, 2, 37, 41, 5, 3))
    state = torch.get_rng_state()
    assert torch.equal(attention(q, k, v, dropout=0.0, kernel=kernel), attention(q, k, v, kernel=kernel))
    assert torch.equal(state, torch.get_rng_state())


CONDITIONS = {
    "all": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window": 5}, {"window": 5}),
    "chunk": ({"chunk": 7, "causal": True}, {"chunk": 7, "causal": True}),
    "padding": (
        {"mask": mask.padding(torch.tensor([0, 23]), torch.tensor([19, 17]))},
        {"lengths": [0, 23], "query_lengths": [19, 17]},
    ),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("tile", [None, (200, 8)])
@everywhere
def test_gradients_belong_to_the_weights_that_were_kept(kernel, condition, tile, monkeypatch):
    if tile is not None:
        monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile[0])
        monkeypatch.setattr(tiles, "TILE_ROWS", tile[1])
    options, said = CONDITIONS[condition]
    q, k, v = (x.requires_grad_() for x in random((2, 4, 2, 19, 29, 29, 29)))
    with torch.no_grad():
        kept = factors(kernel, q, k, 0.3, seed=5, **options)
    seen = formula.allowed(19, 29, **said)
    torch.manual_seed(5)
    out = attention(q, k, v, dropout=0.3, kernel=kernel, **options)
    expected = formula.mix(formula.weights(q, k, seen) * kept, v)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    flow = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(11))
    grads = torch.autograd.grad(out, (q, k, v), flow, retain_graph=True)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, (q, k, v), flow), strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)
    again = torch.autograd.grad(out, (q, k, v), flow)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@everywhere
def test_a_learned_bias_under_dropout(kernel):
    q, k, v = random((2, 4, 2, 19, 29, 29, 29))
    bias = torch.randn(
        4, 19, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    with torch.no_grad():
        kept = factors(kernel, q, k, 0.3, seed=5, mask=bias)
    torch.manual_seed(5)
    out = attention(q, k, v, dropout=0.3, kernel=kernel, mask=bias)
    expected = formula.mix(formula.weights(q, k, formula.allowed(19, 29), bias) * kept, v)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    grad, expected_grad = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@everywhere
def test_hidden_keys_stay_hidden_and_empty_rows_zero(kernel, dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in random((2, 2, 1, 17, 17, 5, 3)))
    torch.manual_seed(0)
    out = attention(q, k, v, mask=mask.padding(torch.tensor([5, 0])), causal=True, dropout=0.4, kernel=kernel)
    assert not out[1].any()
    out.sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
        assert not x.grad[1].any()
    assert not k.grad[0, :, 5:].any()
    assert not v.grad[0, :, 5:].any()


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_impossible_rates(rate):
    q, k, v = random((1, 1, 1, 3, 3, 3, 3))
    with pytest.raises(ValueError, match=r"dropout: expected 0 <= dropout < 1, got"):
        attention(q, k, v, dropout=rate)
