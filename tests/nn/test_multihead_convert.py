"""From torch's nn.MultiheadAttention and back: the same numbers, or a refusal that says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyheads.nn import mask
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import Rotary

VARIANTS = {
    "plain": {},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "keys of another width": {"kdim": 17, "vdim": 17},
    "keys and values of other widths": {"kdim": 17, "vdim": 11},
    "values of another width": {"vdim": 11},
    "other widths, no bias": {"kdim": 17, "vdim": 11, "bias": False},
    "dropout": {"dropout": 0.3},
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def torch_module(**options):
    module = nn.MultiheadAttention(30, 6, dtype=torch.float64, **({"batch_first": True} | options)).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return module


def run(module, q, k, v, **options):
    """torch's module with batch-first tensors, whatever its own order; its boolean masks are inverted."""
    if not module.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out, weights = module(q, k, v, average_attn_weights=False, **options)
    return out if module.batch_first else out.transpose(0, 1), weights


def inputs(module):
    widths = (30, 7), (module.kdim, 11), (module.vdim, 11)
    return tuple(torch.randn(2, length, width, dtype=torch.float64) for width, length in widths)


@pytest.mark.parametrize("variant", VARIANTS)
def test_from_torch(variant):
    theirs = torch_module(**VARIANTS[variant])
    ours, given = MultiHeadAttention.from_torch(theirs), inputs(theirs)
    expected, weights = run(theirs, *given)
    torch.testing.assert_close(ours(*given), expected, rtol=1e-10, atol=1e-10)
    _, found = ours(*given, return_weights=True)
    torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-10)
    padded = torch.arange(11) >= torch.tensor([[11], [4]])
    expected, _ = run(theirs, *given, key_padding_mask=padded)
    for hidden in (~padded[:, None, None], mask.padding(torch.tensor([11, 4]))):
        torch.testing.assert_close(ours(*given, hidden), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant):
    theirs = torch_module(**VARIANTS[variant])
    back = MultiHeadAttention.from_torch(theirs).to_torch()
    assert back.batch_first
    assert back.dropout == theirs.dropout
    assert not back.training
    state, expected = back.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"d_context": 17}, {"dropout": 0.2}], ids=str)
def test_to_torch(options):
    ours = MultiHeadAttention(30, 6, dtype=torch.float64, **options).eval()
    theirs = ours.to_torch()
    given = inputs(theirs)
    expected, _ = run(theirs, *given)
    torch.testing.assert_close(ours(*given), expected, rtol=1e-10, atol=1e-10)
    assert all(p.grad_fn is None for p in theirs.parameters())


def test_weights_are_copied_not_shared():
    theirs = torch_module()
    ours = MultiHeadAttention.from_torch(theirs)
    before = theirs.in_proj_weight.clone()
    with torch.no_grad():
        ours.query.weight.zero_()
        ours.to_torch().out_proj.weight.zero_()
    assert torch.equal(theirs.in_proj_weight, before)
    assert ours.output.weight.any()


def test_mode_and_dtype_are_kept():
    theirs = torch_module(dropout=0.25).to(torch.bfloat16).train()
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training
    assert ours.dropout == 0.25
    assert ours.query.weight.dtype == torch.bfloat16
    assert ours.to_torch().training


def test_gradients_agree():
    theirs = torch_module()
    ours, given = MultiHeadAttention.from_torch(theirs), inputs(theirs)
    run(theirs, *given)[0].square().sum().backward()
    ours(*given).square().sum().backward()
    expected = theirs.in_proj_weight.grad.chunk(3)
    for projection, grad in zip((ours.query, ours.key, ours.value), expected, strict=True):
        torch.testing.assert_close(projection.weight.grad, grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.output.bias.grad, theirs.out_proj.bias.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_what_has_no_counterpart_here(options):
    with pytest.raises(ValueError, match="module: add_bias_kv and add_zero_attn have no counterpart"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(30, 6, **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_heads": 2}, "kv_heads differ from heads"),
        ({"d_key": 4}, "d_key or d_value is not d_model / heads"),
        ({"d_value": 7}, "d_key or d_value is not d_model / heads"),
        ({"heads": 7, "d_key": 4, "d_value": 4}, "d_key or d_value is not d_model / heads"),
        ({"qk_norm": True}, "it normalises queries and keys"),
        ({"rotary": Rotary(4)}, "it has rotary positions"),
        ({"window": 3}, "it has a window or a chunk"),
        ({"chunk": 3, "kv_heads": 2}, "kv_heads differ from heads; it has a window or a chunk"),
    ],
)
def test_what_has_no_counterpart_there(options, said):
    with pytest.raises(ValueError, match=f"nn.MultiheadAttention cannot express this module: {said}"):
        MultiHeadAttention(30, **({"heads": 6} | options)).to_torch()
