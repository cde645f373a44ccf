"""The patterns that studies compare are what they say: equal to the formula with a mask, in float64."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.nn.attention import attention
from manyheads.studies.sparse_patterns import global_window, linear_attention


@pytest.mark.parametrize(
    ("length", "window", "global_tokens"), [(29, 5, 2), (30, 5, 0), (7, 11, 3), (13, 1, 1)]
)
def test_global_window_is_attention_under_its_mask(length, window, global_tokens):
    q, k, v = torch.randn(3, 2, 3, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    i, j = torch.arange(length)[:, None], torch.arange(length)
    allowed = ((i - j).abs() < window) | (i < global_tokens) | (j < global_tokens)
    expected = attention(q, k, v, mask=allowed, kernel="reference")
    assert torch.allclose(global_window(q, k, v, window=window, global_tokens=global_tokens), expected)


def test_linear_attention_is_an_average_with_weights_that_are_no_softmax():
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(2, 3)
    assert torch.allclose(linear_attention(q, k, v), weights / weights.sum(-1, keepdim=True) @ v)
