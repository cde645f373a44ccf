"""TorchAttention is called as nn.MultiheadAttention is, and answers as it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import manyheads as mh
from manyheads.models.torch_attention import TorchAttention

torch.manual_seed(3)
X, MEMORY = torch.randn(2, 5, 15), torch.randn(2, 7, 15)
PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
CALLS = {
    "plain": {},
    "padding": {"key_padding_mask": PADDING},
    "padding added": {"key_padding_mask": torch.zeros(2, 7).masked_fill(PADDING, -1e9)},
    "hidden": {"attn_mask": torch.ones(5, 7, dtype=torch.bool).triu(3)},
    "added": {"attn_mask": torch.randn(5, 7)},
    "for each head": {"attn_mask": torch.randn(6, 5, 7)},
    "both": {
        "attn_mask": torch.randn(5, 7),
        "key_padding_mask": torch.zeros(2, 7).masked_fill(PADDING, -1e9),
    },
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_same_as_torch_with_a_head_silenced(name, batch_first):
    theirs = nn.MultiheadAttention(15, 3, batch_first=batch_first).eval()
    x, memory = (X, MEMORY) if batch_first else (X.transpose(0, 1), MEMORY.transpose(0, 1))
    ours = mh.cut(theirs, {0: [1]}, (x, memory, memory))
    with torch.no_grad(), mh.silence(theirs, {0: [1]}):
        wanted, _ = theirs(x, memory, memory, **CALLS[name])
    got, weights = ours(x, memory, memory, average_attn_weights=False, **CALLS[name])
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    _, all_weights = theirs(x, memory, memory, average_attn_weights=False, **CALLS[name])
    torch.testing.assert_close(weights, all_weights[:, [0, 2]], atol=1e-6, rtol=1e-5)


def test_one_sequence_without_a_batch():
    theirs = nn.MultiheadAttention(15, 3)
    ours = TorchAttention.like(theirs)
    wanted, weights = theirs(X[0], MEMORY[0], MEMORY[0])
    got, mine = ours(X[0], MEMORY[0], MEMORY[0])
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mine, weights, atol=1e-6, rtol=1e-5)
    assert ours(X[0], MEMORY[0], MEMORY[0], need_weights=False)[1] is None


def test_widths_of_keys_and_values_stay_their_own():
    theirs = nn.MultiheadAttention(15, 3, kdim=11, vdim=13, batch_first=True).eval()
    keys, values = torch.randn(2, 7, 11), torch.randn(2, 7, 13)
    ours = mh.cut(theirs, {0: [0, 1]}, (X, keys, values))
    with torch.no_grad(), mh.silence(theirs, {0: [0, 1]}):
        wanted, _ = theirs(X, keys, values)
    torch.testing.assert_close(ours(X, keys, values)[0], wanted, atol=1e-6, rtol=1e-5)


def test_only_an_nn_multihead_attention_will_do():
    with pytest.raises(TypeError, match=r"expected nn.MultiheadAttention, got Linear"):
        TorchAttention.like(nn.Linear(2, 3))
