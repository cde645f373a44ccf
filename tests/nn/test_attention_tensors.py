"""Masks given as tensors: boolean and added, of every shape that broadcasts, learned or not."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import formula
from tests.helpers.kernels import KERNELS, hold, random

from manyheads.nn import mask
from manyheads.nn.attention import attention

B, H, Q, K = 2, 4, 17, 23
BROADCASTS = [
    (Q, K), (1, K), (Q, 1), (1, 1), (K,), (1,), (),
    (H, Q, K), (H, 1, K), (H, Q, 1), (1, Q, K), (H, 1, 1),
    (B, H, Q, K), (B, 1, Q, K), (1, H, Q, K), (B, 1, 1, K), (B, H, 1, K), (B, H, Q, 1), (B, 1, 1, 1),
]  # fmt: skip

everywhere = pytest.mark.parametrize("kernel", KERNELS)
broadcast = pytest.mark.parametrize("shape", BROADCASTS, ids=str)


def tensor(shape, seed=3):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(d_value=5):
    return random((B, H, 2, Q, K, 5, d_value))


@broadcast
@everywhere
def test_boolean(kernel, shape):
    q, k, v = inputs()
    shown = tensor(shape) > 0
    hold(kernel, q, k, v, formula.allowed(Q, K) & shown, mask=shown)


@broadcast
@everywhere
def test_added(kernel, shape):
    q, k, v = inputs(d_value=3)
    bias = tensor(shape)
    hold(kernel, q, k, v, formula.allowed(Q, K), bias, mask=bias)


@broadcast
@everywhere
def test_learned(kernel, shape):
    q, k, v = inputs(d_value=7)
    bias = tensor(shape).requires_grad_()
    seen = formula.allowed(Q, K, causal=True)
    hold(kernel, q, k, v, seen, bias, learned=[bias], mask=bias, causal=True)


@everywhere
def test_two_learned_tensors_of_different_shapes(kernel):
    q, k, v = inputs()
    a, b = tensor((H, Q, K)).requires_grad_(), tensor((B, 1, 1, K), seed=5).requires_grad_()
    joined = mask.as_mask(a) & b & mask.window(7)
    hold(kernel, q, k, v, formula.allowed(Q, K, window=7), a + b, learned=[a, b], mask=joined)


@everywhere
def test_only_the_learned_tensor_gets_a_gradient(kernel):
    q, k, v = inputs()
    bias = tensor((H, Q, K)).requires_grad_()
    attention(q, k, v, mask=bias, kernel=kernel).square().sum().backward()
    expected = tensor((H, Q, K)).requires_grad_()
    formula.attention(q, k, v, formula.allowed(Q, K), expected).square().sum().backward()
    torch.testing.assert_close(bias.grad, expected.grad, rtol=1e-10, atol=1e-10)
    assert q.grad is None


@everywhere
def test_a_learned_bias_without_gradients_enabled(kernel):
    q, k, v = inputs()
    bias = tensor((H, Q, K)).requires_grad_()
    with torch.no_grad():
        out = attention(q, k, v, mask=bias, kernel=kernel)
        expected = formula.attention(q, k, v, formula.allowed(Q, K), bias)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@everywhere
def test_minus_infinity_hides(kernel):
    q, k, v = inputs()
    bias = tensor((B, 1, Q, K)).masked_fill(tensor((B, 1, Q, K), seed=5) > 0.5, -torch.inf)
    bias[1, 0, 3] = -torch.inf
    hold(kernel, q, k, v, formula.allowed(Q, K), bias, mask=bias)
    learned = bias.clone().requires_grad_()
    out = attention(q, k, v, mask=learned, kernel=kernel)
    assert not out[1, :, 3].any()
    out.square().sum().backward()
    assert torch.isfinite(learned.grad).all()
    assert not learned.grad[bias == -torch.inf].any()


@everywhere
def test_the_lowest_number_hides_where_something_else_is_shown(kernel):
    """What transformers and many others write instead of -inf."""
    q, k, v = inputs()
    shown = tensor((B, 1, Q, K)) > 0
    shown[..., 0] = True
    bias = torch.zeros(shown.shape).double().masked_fill(~shown, torch.finfo(torch.float32).min)
    out = attention(q, k, v, mask=bias, kernel=kernel)
    expected = formula.attention(q, k, v, shown)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 5}, {"chunk": 7}], ids=str)
@everywhere
def test_together(kernel, options):
    """Padding, a boolean, an added tensor and a learned one, on top of the geometry."""
    q, k, v = inputs(d_value=3)
    shown, added = tensor((B, 1, Q, K)) > -1, tensor((K,), seed=5)
    learned = tensor((H, Q, 1), seed=9).requires_grad_()
    joined = mask.padding(torch.tensor([11, K]), torch.tensor([Q, 13])) & shown & added & learned
    seen = formula.allowed(Q, K, lengths=[11, K], query_lengths=[Q, 13], **options) & shown
    hold(kernel, q, k, v, seen, added + learned, learned=[learned], mask=joined, **options)


@everywhere
def test_long_padded_sequences_with_tensors(kernel):
    """Long enough for sequences to be computed apart, without their padding."""
    q, k, v = random((3, 4, 2, 71, 71, 5, 5))
    shown, added = tensor((3, 1, 71, 71)) > -1, tensor((3, 4, 1, 71), seed=5)
    joined = mask.padding(torch.tensor([71, 13, 0]), torch.tensor([71, 29, 5])) & shown & added
    seen = formula.allowed(71, 71, causal=True, lengths=[71, 13, 0], query_lengths=[71, 29, 5]) & shown
    hold(kernel, q, k, v, seen, added, mask=joined, causal=True)


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@everywhere
def test_a_bias_of_another_dtype(kernel, dtype, mask_dtype):
    q, k, v = (x.to(dtype) for x in inputs())
    bias = tensor((H, Q, K)).to(mask_dtype)
    out = attention(q, k, v, mask=bias, causal=True, kernel=kernel)
    assert out.dtype == dtype
    expected = formula.attention(q, k, v, formula.allowed(Q, K, causal=True), bias)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@everywhere
def test_a_learned_bias_keeps_its_dtype_in_the_gradient(kernel):
    q, k, v = (x.bfloat16() for x in inputs())
    bias = tensor((H, Q, K)).float().requires_grad_()
    attention(q, k, v, mask=bias, kernel=kernel).float().square().sum().backward()
    expected = bias.detach().double().requires_grad_()
    formula.attention(q, k, v, formula.allowed(Q, K), expected).square().sum().backward()
    assert bias.grad.dtype == torch.float32
    torch.testing.assert_close(bias.grad.double(), expected.grad, rtol=0.05, atol=0.05)


@everywhere
def test_masks_of_other_strides(kernel):
    q, k, v = inputs()
    bias = tensor((K, Q, H, B)).permute(3, 2, 1, 0)
    hold(kernel, q, k, v, formula.allowed(Q, K) & (bias > 0), mask=bias > 0)
    hold(kernel, q, k, v, formula.allowed(Q, K), bias, mask=bias)
    expanded = tensor((1, 1, Q, 1)).expand(B, H, Q, K).detach().requires_grad_()
    hold(kernel, q, k, v, formula.allowed(Q, K), expanded, learned=[expanded], mask=expanded)


@everywhere
def test_nothing_to_attend_to_gives_zeros_and_zero_gradient(kernel):
    q, k, v = (x.requires_grad_() for x in inputs())
    shown = torch.ones(B, 1, Q, K, dtype=torch.bool)
    shown[0, 0, 5] = False
    shown[1] = False
    out = attention(q, k, v, mask=shown, kernel=kernel)
    assert not out[0, :, 5].any()
    assert not out[1].any()
    out.square().sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
        assert not x.grad[1].any()
    assert not q.grad[0, :, 5].any()
    assert q.grad[0, :, 4].any()
