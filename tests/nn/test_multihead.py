"""MultiHeadAttention against the textbook, head by head in float64, in every variant; and its ways around."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers import formula
from torch.utils.checkpoint import checkpoint

from manyheads.nn import mask
from manyheads.nn.attention import attention
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import Rotary
from manyheads.nn.statistics import statistics


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def build(d_model=30, heads=6, **options):
    """A module in float64 whose biases and gains are not the zeros and ones they start with."""
    module = MultiHeadAttention(d_model, heads, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 2)
    return module


def tokens(length, width=30, batch=2):
    return torch.randn(batch, length, width, dtype=torch.float64)


VARIANTS = {
    "plain": {},
    "one head": {"heads": 1},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "free widths": {"heads": 7, "d_key": 4, "d_value": 11},
    "narrow values": {"d_key": 8, "d_value": 3, "kv_heads": 3},
    "context": {"d_context": 17},
    "no bias": {"bias": False},
    "normalised": {"qk_norm": True, "kv_heads": 3},
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "everything": {
        "heads": 4, "kv_heads": 2, "d_key": 6, "d_value": 5, "d_context": 17, "bias": False, "qk_norm": True,
        "window": 6, "chunk": 9,
    },
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["auto", "reference", "fused", "tiled"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_textbook(variant, causal, kernel):
    options = VARIANTS[variant]
    module = build(kernel=kernel, **options)
    query, context = tokens(11), tokens(13, module.key.in_features)
    seen = formula.allowed(11, 13, causal=causal, window=module.window, chunk=module.chunk)
    expected, _ = formula.multihead(module, query, context, context, seen)
    out = module(query, context, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    flow = torch.randn_like(out)
    parameters = [*module.parameters()]
    expected_grads = torch.autograd.grad(expected, parameters, flow)
    for grad, expected_grad in zip(torch.autograd.grad(out, parameters, flow), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"qk_norm": True}, {"window": 4}], ids=str)
def test_rotary(width, options):
    module = build(36, 6, rotary=Rotary(width), **options)
    x = tokens(13, 36)
    seen = formula.allowed(13, 13, causal=True, window=module.window)
    expected, _ = formula.multihead(module, x, x, x, seen, rotary=width)
    torch.testing.assert_close(module(x, causal=True), expected, rtol=1e-10, atol=1e-10)


def test_the_call_of_every_tutorial():
    module = build()
    q, k, v = tokens(7), tokens(11), tokens(11)
    shown = torch.rand(2, 1, 7, 11) > 0.4
    expected, _ = formula.multihead(module, q, k, v, shown)
    torch.testing.assert_close(module(q, k, v, shown), expected, rtol=1e-10, atol=1e-10)


def test_key_defaults_to_query_and_value_to_key():
    module, x, y = build(), tokens(7), tokens(11)
    assert torch.equal(module(x), module(x, x, x))
    assert torch.equal(module(x, y), module(x, y, y))
    assert not torch.allclose(module(x, y), module(x, y, -y))


def test_masks_of_every_kind():
    module, x = build(), tokens(7)
    bias = torch.randn(2, 6, 7, 7, dtype=torch.float64)
    joined = mask.padding(torch.tensor([7, 4])) & bias
    seen = formula.allowed(7, 7, causal=True, lengths=[7, 4])
    expected, weights = formula.multihead(module, x, x, x, seen, bias)
    out, found = module(x, mask=joined, causal=True, return_weights=True)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(module(x, mask=joined, causal=True), expected, rtol=1e-10, atol=1e-10)


def test_a_query_that_sees_nothing_gets_the_output_bias():
    module, x = build(), tokens(5).requires_grad_()
    out = module(x, mask=mask.padding(torch.tensor([5, 0])))
    torch.testing.assert_close(out[1], module.output.bias.expand(5, -1))
    out.sum().backward()
    assert not x.grad[1].any()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_statistics_in_their_order(variant):
    module = build(**VARIANTS[variant])
    query, context = tokens(11), tokens(13, module.key.in_features)
    seen = formula.allowed(11, 13, causal=True, window=module.window, chunk=module.chunk)
    expected, weights = formula.multihead(module, query, context, context, seen)
    out, found, core = module(query, context, causal=True, return_weights=True, return_statistics=True)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-10)
    entropy = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(core["entropy"], entropy, rtol=1e-9, atol=1e-9)
    out, found = module(query, context, causal=True, return_weights=True)
    torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-10)
    out, full = module(query, context, causal=True, return_statistics="full")
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(full["confidence"], weights.amax(-1), rtol=1e-9, atol=1e-9)
    assert "confidence" not in core
    assert not full["entropy"].requires_grad


def test_weights_are_those_before_dropout_and_carry_gradients():
    module, x = build(dropout=0.5), tokens(7)
    _, weights = module(x, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 7, dtype=torch.float64))
    weights.square().sum().backward()
    assert module.query.weight.grad.any()


def test_dropout_only_while_training():
    module, x = build(dropout=0.5), tokens(7)
    dropped = [module(x) for _ in range(2)]
    assert not torch.allclose(*dropped)
    both = [module(x, return_weights=True)[0] for _ in range(2)]
    assert not torch.allclose(*both)
    module.eval()
    expected, _ = formula.multihead(module, x, x, x, formula.allowed(7, 7))
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def test_dropout_averages_to_the_undropped_output():
    module, x = build(dropout=0.25), tokens(7, batch=1)
    many = module(x.expand(4000, -1, -1))
    expected = module.eval()(x)[0]
    assert ((many.mean(0) - expected).abs() / (many.std(0) / 4000**0.5)).max() < 5


def test_attention_function_and_module_agree_on_heads():
    """Head h owns rows h * d_key of the query projection, and reads key head h // group."""
    module, x = build(kv_heads=2), tokens(7)
    q, k, v = (p(x).unflatten(2, (-1, 5)).transpose(1, 2) for p in (module.query, module.key, module.value))
    joined = attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.output(joined))
    _, core = module(x, return_statistics=True)
    torch.testing.assert_close(core["self"], statistics(q, k)["self"])


def test_deepcopy_and_state_dict():
    options = {"kv_heads": 2, "d_key": 4, "d_value": 5, "qk_norm": True, "rotary": Rotary(4)}
    module, other, x = build(**options), build(**options), tokens(7)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), module(x))
    assert not torch.allclose(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert {name.split(".")[0] for name in module.state_dict()} == {
        "query", "key", "value", "output", "query_norm", "key_norm",
    }  # fmt: skip
    with torch.no_grad():
        twin.query.weight.zero_()
    assert module.query.weight.any()


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "rotary": Rotary(4)}, {"dropout": 0.1}], ids=str)
def test_autocast(options):
    module, x = build(**options).float(), tokens(11).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, causal=True)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    if not module.dropout:
        torch.testing.assert_close(out.float(), module(x, causal=True), rtol=5e-2, atol=5e-2)
        half = x.grad.clone()
        x.grad = None
        module(x, causal=True).square().sum().backward()
        assert (half - x.grad).norm() < 0.03 * x.grad.norm()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    module, x = build(qk_norm=True, rotary=Rotary(4)), tokens(11)
    expected, _ = formula.multihead(module, x, x, x, formula.allowed(11, 11, causal=True), rotary=4)
    out = module.to(dtype)(x.to(dtype), causal=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing(dropout):
    module, x = build(dropout=dropout, kv_heads=2), tokens(11)
    grads = []
    for run in (module, lambda x, **options: checkpoint(module, x, use_reentrant=False, **options)):
        module.zero_grad()
        torch.manual_seed(3)
        run(x, causal=True).square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["self", "grouped", "context"])
def test_output_variance_does_not_depend_on_the_number_of_heads(kind):
    """d_model 64, heads 1 to 8, averaged over 8 draws of the weights: within 8% of their mean."""
    x, context = torch.randn(16, 32, 64), torch.randn(16, 32, 96)
    variances = []
    for heads in (1, 2, 4, 8):
        options = {"d_context": 96} if kind == "context" else {"kv_heads": 1} if kind == "grouped" else {}
        modules = [MultiHeadAttention(64, heads, **options) for _ in range(8)]
        given = (x, context) if kind == "context" else (x,)
        with torch.no_grad():
            variances.append(torch.stack([module(*given).var() for module in modules]).mean())
    variances = torch.stack(variances)
    assert ((variances / variances.mean() - 1).abs() < 0.08).all(), variances
