"""Every kernel against the formula in float64, values and gradients, for every geometry and shape."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import formula
from tests.helpers.kernels import KERNELS, hold, random

from manyheads.nn import mask
from manyheads.nn.attention import attention

SHAPES = {  # batch, heads, kv_heads, queries, keys, d_key, d_value
    "plain": (2, 3, 3, 37, 37, 5, 5),
    "grouped": (2, 4, 2, 37, 37, 5, 5),
    "one key head": (1, 6, 1, 23, 23, 7, 7),
    "wide values": (2, 3, 3, 131, 131, 5, 11),
    "narrow values": (2, 2, 1, 67, 67, 11, 3),
    "cache": (1, 4, 1, 53, 101, 7, 7),
    "cache, wide values": (2, 4, 2, 11, 89, 3, 5),
    "one step": (3, 6, 2, 1, 67, 5, 5),
    "more queries than keys": (2, 2, 2, 101, 53, 7, 3),
    "one key": (2, 2, 1, 67, 1, 3, 3),
    "one of each": (1, 1, 1, 1, 1, 1, 1),
    "no queries": (2, 2, 1, 0, 7, 3, 5),
    "no keys": (2, 2, 1, 7, 0, 5, 3),
    "nothing at all": (2, 2, 1, 0, 0, 3, 3),
    "no batch": (0, 2, 1, 7, 11, 3, 3),
}

GEOMETRIES = {
    "all": {},
    "causal": {"causal": True},
    "window 1": {"window": 1},
    "window": {"window": 7},
    "wide window": {"window": 1000},
    "chunk 1": {"chunk": 1},
    "chunk": {"chunk": 13},
    "wide chunk": {"chunk": 1000},
    "causal window": {"causal": True, "window": 5},
    "causal chunk": {"causal": True, "chunk": 13},
    "window in chunk": {"window": 3, "chunk": 11},
    "all three": {"causal": True, "window": 3, "chunk": 11},
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_geometry(kernel, shape, geometry):
    q, k, v = random(SHAPES[shape])
    options = GEOMETRIES[geometry]
    hold(kernel, q, k, v, formula.allowed(q.shape[2], k.shape[2], **options), **options)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometry_as_options_and_as_a_mask_are_one(geometry):
    q, k, v = random(SHAPES["cache"])
    options = GEOMETRIES[geometry]
    joined = mask.Mask()
    for name, value in options.items():
        joined = joined & (mask.causal() if name == "causal" else getattr(mask, name)(value))
    assert torch.equal(attention(q, k, v, mask=joined), attention(q, k, v, **options))


PADDINGS = {
    "keys": ([37, 0, 5], None),
    "keys and queries": ([37, 0, 5], [37, 0, 5]),
    "queries apart": ([5, 37, 0], [0, 11, 37]),
    "past the end": ([41, 3, 99], [99, 3, 41]),
}


@pytest.mark.parametrize("geometry", ["all", "causal", "causal window", "chunk", "all three"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_padding(kernel, padding, geometry):
    q, k, v = random((3, 4, 2, 37, 37, 5, 3))
    lengths, query_lengths = PADDINGS[padding]
    options = GEOMETRIES[geometry]
    seen = formula.allowed(37, 37, lengths=lengths, query_lengths=query_lengths, **options)
    hold(kernel, q, k, v, seen, mask=_padding(lengths, query_lengths), **options)


def _padding(lengths, query_lengths=None):
    tensors = (None if x is None else torch.tensor(x) for x in (lengths, query_lengths))
    return mask.padding(*tensors)


@pytest.mark.parametrize(("queries", "keys"), [(23, 41), (41, 23), (1, 41)])
@pytest.mark.parametrize("geometry", ["all", "causal", "causal window", "window in chunk"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_of_queries_and_keys_of_other_lengths(kernel, geometry, queries, keys):
    q, k, v = random((3, 4, 2, queries, keys, 3, 3))
    options = GEOMETRIES[geometry]
    lengths, query_lengths = [keys, 17, 0], [0, queries, 13]
    seen = formula.allowed(queries, keys, lengths=lengths, query_lengths=query_lengths, **options)
    hold(kernel, q, k, v, seen, mask=_padding(lengths, query_lengths), **options)


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("geometry", ["all", "causal", "window", "causal chunk"])
@pytest.mark.parametrize(("queries", "keys"), [(29, 29), (11, 29)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_alibi(kernel, queries, keys, geometry, heads):
    q, k, v = random((2, heads, 1, queries, keys, 5, 5))
    options = GEOMETRIES[geometry]
    seen = formula.allowed(queries, keys, lengths=[23, keys], **options)
    bias = formula.alibi(heads, queries, keys)
    hold(kernel, q, k, v, seen, bias, mask=mask.alibi(heads) & _padding([23, keys]), **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale(kernel):
    q, k, v = random(SHAPES["wide values"])
    for scale in (0.0, 1.3, -0.7):
        hold(kernel, q, k, v, formula.allowed(131, 131, causal=True), scale=scale, causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_far_from_zero_do_not_overflow(kernel):
    q, k, v = (x.float() for x in random(SHAPES["plain"]))
    out = attention(q * 1e3, k * 1e3, v, causal=True, kernel=kernel)
    expected = formula.attention(q * 1e3, k * 1e3, v, formula.allowed(37, 37, causal=True))
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


LAYOUTS = {
    "heads of a token side by side": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second channel": lambda x: torch.stack((x, x + 1), dim=-1).flatten(3)[..., ::2],
    "one sequence for all": lambda x: x[:1].expand(x.shape),
    "one head for all": lambda x: x[:, :1].expand(x.shape),
    "one channel for all": lambda x: x[..., :1].expand(x.shape),
    "a part of something larger": lambda x: torch.cat((x, x, x), dim=2)[:, :, x.shape[2] : 2 * x.shape[2]],
}


@pytest.mark.parametrize("geometry", ["all", "causal", "window", "chunk"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_in_memory(kernel, layout, geometry):
    q, k, v = (LAYOUTS[layout](x) for x in random((2, 4, 2, 37, 37, 5, 7)))
    options = GEOMETRIES[geometry]
    seen = formula.allowed(37, 37, lengths=[37, 19], **options)
    hold(kernel, q, k, v, seen, mask=_padding([37, 19]), **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("geometry", ["all", "causal", "window", "causal chunk"])
@pytest.mark.parametrize("shape", ["grouped", "wide values", "cache", "one step"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision(kernel, shape, geometry, dtype, tolerance):
    q, k, v = (x.to(dtype) for x in random(SHAPES[shape]))
    options = GEOMETRIES[geometry]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = attention(*inputs, kernel=kernel, **options)
    expected = formula.attention(*exact, formula.allowed(q.shape[2], k.shape[2], **options))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    flow = torch.randn(expected.shape, generator=torch.Generator().manual_seed(11)).to(dtype)
    out.backward(flow)
    expected.backward(flow.double())
    for x, y in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=3 * tolerance, atol=3 * tolerance)
