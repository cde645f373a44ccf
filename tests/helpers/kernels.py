"""The kernels, random inputs for them, and the formula that they are held to."""

from __future__ import annotations

import torch
from tests.helpers import formula
from torch import Tensor

from manyheads.nn.attention import attention

KERNELS = ("reference", "fused", "tiled", "auto")


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, keys, d_key, d_value = shape
    generator = torch.Generator().manual_seed(7)
    sizes = ((heads, queries, d_key), (kv_heads, keys, d_key), (kv_heads, keys, d_value))
    return tuple(torch.randn(batch, *size, dtype=dtype, generator=generator) for size in sizes)


def hold(kernel, q, k, v, seen, bias=None, learned=(), tolerance=1e-10, scale=None, **options):
    """The kernel's output and its gradients by q, k, v and what is learned equal the formula's."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, scale=scale, kernel=kernel, **options)
    expected = formula.attention(*inputs, seen, bias, scale)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    flow = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(11))
    wanted = [*inputs, *learned]
    grads = torch.autograd.grad(out, wanted, flow)
    expected_grads = torch.autograd.grad(expected, wanted, flow)
    for x, grad, expected_grad in zip(wanted, grads, expected_grads, strict=True):
        assert grad.shape == x.shape
        torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=tolerance)
