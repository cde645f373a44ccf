"""What attention refuses, with which words; and what must hold for any input it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.kernels import KERNELS, random

from manyheads.nn import mask
from manyheads.nn.attention import attention

modest = settings(max_examples=30, derandomize=True, deadline=None)
lengths = st.integers(1, 19)
kernels = st.sampled_from(KERNELS)
everywhere = pytest.mark.parametrize("kernel", KERNELS)


def zeros(*shapes, dtype=torch.float32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


SMALL = (1, 1, 2, 3)
REFUSED = {
    "3 axes": (
        zeros((2, 5, 3), (2, 5, 3), (2, 5, 3)),
        ValueError,
        r"q: expected \(batch, heads, length, width\), got shape \(2, 5, 3\)",
    ),
    "list": (([[1.0]], *zeros(SMALL, SMALL)), TypeError, "q: expected a tensor, got list"),
    "int": (
        zeros(SMALL, SMALL, SMALL, dtype=torch.int64),
        TypeError,
        "q: expected a floating dtype, got torch.int64",
    ),
    "float and double": (
        zeros(SMALL, SMALL) + zeros(SMALL, dtype=torch.float64),
        TypeError,
        "v: expected the dtype of q, torch.float32, got torch.float64",
    ),
    "half and float": (
        zeros(SMALL, dtype=torch.bfloat16) + zeros(SMALL, SMALL),
        TypeError,
        "k: expected the dtype of q, torch.bfloat16, got torch.float32",
    ),
    "devices": (
        (*zeros(SMALL), torch.zeros(SMALL, device="meta"), *zeros(SMALL)),
        ValueError,
        "k: expected the device of q, cpu, got meta",
    ),
    "batch": (
        zeros((2, 1, 5, 3), (3, 1, 5, 3), (3, 1, 5, 3)),
        ValueError,
        "k: expected the batch of q, 2, got 3",
    ),
    "widths": (
        zeros((2, 1, 5, 3), (2, 1, 5, 4), (2, 1, 5, 3)),
        ValueError,
        "k: expected the width of q, 3, got 4",
    ),
    "groups": (
        zeros((2, 5, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3)),
        ValueError,
        "k: its 2 heads do not divide the 5 heads of q",
    ),
    "no heads": (
        zeros((2, 5, 5, 3), (2, 0, 5, 3), (2, 0, 5, 3)),
        ValueError,
        "k: its 0 heads do not divide the 5 heads of q",
    ),
    "more key heads": (
        zeros((2, 2, 5, 3), (2, 4, 5, 3), (2, 4, 5, 3)),
        ValueError,
        "k: its 4 heads do not divide the 2 heads of q",
    ),
    "value heads": (
        zeros((2, 4, 5, 3), (2, 2, 5, 3), (2, 4, 5, 3)),
        ValueError,
        r"v: expected the heads and length of k, \(2, 5\), got \(4, 5\)",
    ),
    "value length": (
        zeros((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 6, 3)),
        ValueError,
        r"v: expected the heads and length of k, \(2, 5\), got \(2, 6\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_go_together(case):
    (q, k, v), error, said = REFUSED[case]
    with pytest.raises(error, match=said):
        attention(q, k, v)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"mask": torch.ones(5, 5, dtype=torch.int64)}, TypeError, "mask: got a tensor of torch.int64"),
        ({"mask": "causal"}, TypeError, "mask: expected a Mask or a tensor, got str"),
        ({"mask": torch.ones(4, 5) > 0}, ValueError, r"mask: shape \(4, 5\) does not broadcast"),
        ({"mask": mask.padding(torch.tensor([1, 2, 3]))}, ValueError, "mask lengths: got 3 .* batch of 2"),
        ({"mask": mask.alibi(3)}, ValueError, "alibi was made for 3 heads, attention has 4"),
        ({"window": 0}, ValueError, "window: expected at least 1, got 0"),
        ({"chunk": -1}, ValueError, "chunk: expected at least 1, got -1"),
        ({"window": 2.0}, TypeError, "window: expected a whole number, got 2.0"),
        ({"mask": mask.chunk(3), "chunk": 2}, ValueError, "different chunks cannot be joined: got 3 and 2"),
        ({"dropout": 1.0}, ValueError, "dropout: expected 0 <= dropout < 1, got 1.0"),
        (
            {"kernel": "flash"},
            ValueError,
            "kernel: expected one of auto, .*, got 'flash'",
        ),
    ],
)
def test_options_that_cannot_be(options, error, said):
    q, k, v = random((2, 4, 2, 5, 5, 3, 3), torch.float32)
    with pytest.raises(error, match=said):
        attention(q, k, v, **options)


@everywhere
def test_inputs_are_left_alone(kernel):
    q, k, v = random((2, 4, 2, 37, 37, 5, 3))
    bias = torch.randn(37, 37, dtype=torch.float64)
    bias[3, 4] = -torch.inf
    before = [x.clone() for x in (q, k, v, bias)]
    attention(q, k, v, mask=bias, causal=True, dropout=0.1, kernel=kernel)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, bias), before, strict=True))


@modest
@given(
    queries=lengths, keys=lengths, window=st.none() | st.integers(1, 7), causal=st.booleans(), kernel=kernels
)
def test_rows_sum_to_one_or_to_zero(queries, keys, window, causal, kernel):
    q, k, _ = random((2, 4, 2, queries, keys, 3, 3))
    ones = torch.ones(2, 2, keys, 1, dtype=torch.float64)
    total = attention(q, k, ones, window=window, causal=causal, kernel=kernel)[..., 0]
    something = mask.Mask(causal=causal, window=window).dense(queries, keys).any(-1)
    torch.testing.assert_close(total, something.double().expand_as(total), rtol=1e-12, atol=1e-12)


@modest
@given(queries=lengths, keys=lengths, seed=st.integers(0, 99), kernel=kernels)
def test_the_order_of_keys_does_not_matter(queries, keys, seed, kernel):
    q, k, v = random((2, 4, 2, queries, keys, 3, 5))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(keys, generator=generator)
    shown = torch.rand(2, 1, queries, keys, generator=generator) > 0.3
    out = attention(q, k, v, mask=shown, kernel=kernel)
    again = attention(q, k[:, :, order], v[:, :, order], mask=shown[..., order], kernel=kernel)
    torch.testing.assert_close(again, out, rtol=1e-12, atol=1e-12)


@modest
@given(queries=lengths, keys=lengths, seed=st.integers(0, 99), kernel=kernels)
def test_one_vector_added_to_all_keys_changes_nothing(queries, keys, seed, kernel):
    q, k, v = random((2, 4, 2, queries, keys, 3, 5))
    shift = 10 * torch.randn(2, 2, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    out = attention(q, k, v, causal=True, kernel=kernel)
    torch.testing.assert_close(
        attention(q, k + shift, v, causal=True, kernel=kernel), out, rtol=1e-10, atol=1e-10
    )


@modest
@given(length=st.integers(2, 19), split=st.integers(1, 18), causal=st.booleans(), kernel=kernels)
def test_the_last_queries_alone_get_what_they_get_among_all(length, split, causal, kernel):
    split = min(split, length - 1)
    q, k, v = random((2, 4, 2, length, length, 3, 3))
    whole = attention(q, k, v, causal=causal, window=5, kernel=kernel)
    last = attention(q[:, :, split:], k, v, causal=causal, window=5, kernel=kernel)
    torch.testing.assert_close(last, whole[:, :, split:], rtol=1e-12, atol=1e-12)


@modest
@given(length=st.integers(2, 19), seed=st.integers(0, 99), kernel=kernels)
def test_the_future_does_not_change_the_past(length, seed, kernel):
    q, k, v = random((2, 4, 2, length, length, 3, 3))
    change = torch.randn(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    out = attention(q, k, v, causal=True, kernel=kernel)
    q, k, v = (torch.cat((x[:, :, :-1], x[:, :, -1:] + change), dim=2) for x in (q, k, v))
    again = attention(q, k, v, causal=True, kernel=kernel)
    torch.testing.assert_close(again[:, :, :-1], out[:, :, :-1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(again[:, :, -1], out[:, :, -1])


@modest
@given(keys=lengths, scale=st.floats(-3, 3), kernel=kernels)
def test_the_output_is_linear_in_the_values(keys, scale, kernel):
    q, k, v = random((1, 2, 1, 5, keys, 3, 3))
    other = v.flip(2)
    both = attention(q, k, v + scale * other, kernel=kernel)
    expected = attention(q, k, v, kernel=kernel) + scale * attention(q, k, other, kernel=kernel)
    torch.testing.assert_close(both, expected, rtol=1e-10, atol=1e-10)
