"""What MultiHeadAttention refuses, and the words in which it says so."""

from __future__ import annotations

import pytest
import torch

from manyheads.nn import mask
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import Rotary


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"heads": 7},
            "heads: 7 heads do not divide d_model 30; choose another .* d_key and d_value",
        ),
        ({"heads": 7, "d_key": 4}, "heads: 7 heads do not divide d_model 30"),
        ({"heads": 0}, "heads: expected a whole number of at least 1, got 0"),
        ({"heads": 2.0}, "heads: expected a whole number of at least 1, got 2.0"),
        ({"d_model": -2}, "d_model: expected a whole number of at least 1, got -2"),
        ({"kv_heads": 4}, "kv_heads: 4 key heads do not divide 6 heads"),
        ({"kv_heads": 12}, "kv_heads: 12 key heads do not divide 6 heads"),
        ({"kv_heads": 0}, "kv_heads: expected a whole number of at least 1, got 0"),
        ({"d_context": 0}, "d_context: expected a whole number of at least 1, got 0"),
        ({"d_key": 0}, "d_key: expected a whole number of at least 1, got 0"),
        ({"d_value": -1}, "d_value: expected a whole number of at least 1, got -1"),
        ({"dropout": 1.0}, "dropout: expected 0 <= dropout < 1, got 1.0"),
        ({"dropout": -0.1}, "dropout: expected 0 <= dropout < 1, got -0.1"),
        ({"rotary": Rotary(6)}, "rotary: it rotates 6 channels, a head has d_key 5"),
        ({"window": 0}, "window: expected at least 1, got 0"),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
        ({"kernel": "flash"}, "kernel: expected one of auto, reference, fused, tiled, got 'flash'"),
    ],
)
def test_modules_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        MultiHeadAttention(**({"d_model": 30, "heads": 6} | given))


@pytest.mark.parametrize(
    "given", [{"window": 2.5}, {"chunk": "3"}, {"d_key": 2.5}, {"d_value": "3"}], ids=str
)
def test_sizes_of_the_wrong_type(given):
    name = next(iter(given))
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*expected"):
        MultiHeadAttention(30, 6, **given)


def zeros(*shapes, dtype=torch.float32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (zeros((2, 5, 31)), ValueError, r"query: expected \(batch, length, 30\), got \(2, 5, 31\)"),
        (zeros((5, 30)), ValueError, r"query: expected \(batch, length, 30\), got \(5, 30\)"),
        (([1.0],), TypeError, r"query: expected a tensor \(batch, length, 30\), got list"),
        (
            zeros((2, 5, 30), (2, 5, 30)),
            ValueError,
            r"key: expected \(batch, length, 17\), got \(2, 5, 30\)",
        ),
        (zeros((2, 5, 30), (3, 5, 17)), ValueError, "key: expected the batch of query, 2, got 3"),
        (
            zeros((2, 5, 30), (2, 7, 17), (2, 7, 30)),
            ValueError,
            r"value: expected \(batch, length, 17\), got \(2, 7, 30\)",
        ),
        (
            zeros((2, 5, 30), (2, 7, 17), (2, 6, 17)),
            ValueError,
            r"value: expected the batch and length of key, \(2, 7\), got \(2, 6\)",
        ),
        (zeros((2, 5, 30)), ValueError, r"key: expected \(batch, length, 17\), got \(2, 5, 30\)"),
    ],
)
def test_inputs_that_do_not_fit(given, error, said):
    with pytest.raises(error, match=said):
        MultiHeadAttention(30, 6, d_context=17)(*given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (zeros((2, 5, 30), dtype=torch.float64), r"query: .*float64.*float32|query: .*float32.*float64"),
        (zeros((2, 5, 30), dtype=torch.int64), r"query: .*int64"),
        (zeros((2, 5, 30)) + zeros((2, 5, 30), dtype=torch.bfloat16), r"key: .*bfloat16"),
        (zeros((2, 5, 30), (2, 5, 30)) + zeros((2, 5, 30), dtype=torch.float64), r"value: .*float64"),
    ],
)
def test_dtypes_that_do_not_mix(given, said):
    with pytest.raises(TypeError, match=said):
        MultiHeadAttention(30, 6)(*given)


@pytest.mark.parametrize("options", [{}, {"return_weights": True}, {"return_statistics": True}], ids=str)
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (torch.ones(5, 5, dtype=torch.int64), TypeError, "mask: got a tensor of torch.int64"),
        (
            torch.ones(2, 5) > 0,
            ValueError,
            r"mask: shape \(2, 5\) .* mask\[:, None, None, :\]",
        ),
        (
            torch.ones(2, 5, 5) > 0,
            ValueError,
            r"mask: shape \(2, 5, 5\) .* mask\[:, None\]",
        ),
        (mask.padding(torch.tensor([1, 2, 3])), ValueError, "mask lengths: got 3 lengths for a batch of 2"),
        (mask.alibi(5), ValueError, "alibi was made for 5 heads, attention has 6"),
    ],
)
def test_masks_that_do_not_fit(given, error, said, options):
    with pytest.raises(error, match=said):
        MultiHeadAttention(30, 6)(*zeros((2, 5, 30)), mask=given, **options)


def test_statistics_that_do_not_exist():
    with pytest.raises(ValueError, match="expected 'core', 'logits' or 'full', got 'some'"):
        MultiHeadAttention(30, 6)(*zeros((2, 5, 30)), return_statistics="some")
