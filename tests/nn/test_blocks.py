"""TransformerBlock and FeedForward against the formulas written out, and under checkpointing and compile."""

import copy

import pytest
import torch

from manyheads.nn import blocks, mask
from manyheads.nn.blocks import FeedForward, TransformerBlock
from manyheads.nn.cache import KVCache
from manyheads.nn.positions import Rotary


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def test_feed_forward_is_its_formula():
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    plain = FeedForward(5, 11, activation="relu").double()
    torch.testing.assert_close(plain(x), plain.down(plain.up(x).clamp(min=0)))
    gated = FeedForward(5, 11, activation="silu", gated=True, bias=False).double()
    gate, up = x @ gated.gate.weight.T, x @ gated.up.weight.T
    torch.testing.assert_close(gated(x), (gate * gate.sigmoid() * up) @ gated.down.weight.T)
    assert FeedForward(5).up.weight.shape == (20, 5)


def test_feed_forward_takes_any_function_or_module_as_activation():
    x = torch.randn(2, 7, 5)
    square = FeedForward(5, 11, activation=lambda h: h.relu() ** 2)
    torch.testing.assert_close(square(x), square.down(square.up(x).relu() ** 2))
    learned = FeedForward(5, 11, activation=torch.nn.PReLU())
    assert "activation.weight" in learned.state_dict()


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_block_is_its_formula(norm, residual, rms_norm):
    block = TransformerBlock(15, 3, norm=norm, residual=residual, rms_norm=rms_norm, cross=True, d_context=7)
    block = block.double()
    x, context = torch.randn(2, 7, 15).double(), torch.randn(2, 11, 7).double()
    parts = [
        (block.attention_norm, lambda y: block.attention(y, causal=True)),
        (block.cross_norm, lambda y: block.cross_attention(y, context)),
        (block.feed_forward_norm, block.feed_forward),
    ]
    expected = x
    for norm_of, part in parts:
        y = part(norm_of(expected)) if norm == "pre" else part(expected)
        y = expected + y if residual else y
        expected = norm_of(y) if norm == "post" else y
    torch.testing.assert_close(block(x, context, causal=True), expected)


def test_rms_norm_divides_by_the_root_mean_square():
    norm = TransformerBlock(5, 1, rms_norm=True, norm_eps=0.5).attention_norm
    x = torch.randn(3, 5)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt())
    assert not hasattr(norm, "bias")


def test_bias_false_leaves_no_bias_anywhere():
    names = TransformerBlock(15, 3, bias=False, cross=True, gated=True).state_dict()
    assert not [name for name in names if "bias" in name]


def test_attention_options_reach_the_attention_and_stay_off_the_cross_attention():
    block = TransformerBlock(12, 6, kv_heads=2, window=3, rotary=Rotary(2), cross=True, attention_dropout=0.3)
    assert block.attention.key.weight.shape == (4, 12)
    assert block.cross_attention.key.weight.shape == (4, 12)
    assert block.attention.rotary is not None
    assert block.cross_attention.rotary is None
    x = torch.randn(1, 11, 12)
    moved = x.clone()
    moved[:, 8:] += 1
    block.eval()
    context = torch.randn(1, 5, 12)
    torch.testing.assert_close(block(x, context)[:, :6], block(moved, context)[:, :6])
    turned = block(x, context.flip(1))
    torch.testing.assert_close(turned, block(x, context), atol=1e-5, rtol=0)


def test_masks_hide_from_self_and_cross_attention():
    block = TransformerBlock(15, 3, cross=True)
    x, context = torch.randn(2, 7, 15), torch.randn(2, 11, 15)
    lengths, context_lengths = torch.tensor([7, 4]), torch.tensor([2, 11])
    hide = {"mask": mask.padding(lengths), "context_mask": mask.padding(context_lengths)}
    out = block(x, context, **hide)
    other_x, other_context = x.clone(), context.clone()
    other_x[1, 4:] = 9
    other_context[0, 2:] = 9
    other = block(other_x, other_context, **hide)
    torch.testing.assert_close(out[0], other[0])
    torch.testing.assert_close(out[1, :4], other[1, :4])
    assert not torch.allclose(out[1, 4:], other[1, 4:])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tokens", [3, 1000])
def test_checkpointing_changes_nothing_but_memory(norm, tokens, monkeypatch):
    monkeypatch.setattr(blocks, "SLICE", tokens)
    plain = TransformerBlock(15, 3, norm=norm, dropout=0.0, cross=True).double()
    saving = copy.deepcopy(plain)
    saving.checkpoint = True
    results = []
    for block in (plain, saving):
        x = torch.arange(2 * 11 * 15).view(2, 11, 15).double().sin().requires_grad_()
        out = block(x, x.flip(1), causal=True, mask=mask.padding(torch.tensor([11, 7])))
        (out.square().sum()).backward()
        results.append([out, x.grad, *(p.grad for p in block.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_keeps_the_input_only():
    def kept(block):
        sizes = []
        x = torch.randn(1, 64, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            block(x)
        return sum(sizes)

    assert kept(TransformerBlock(16, 2)) > 10 * 64 * 16
    assert kept(TransformerBlock(16, 2, checkpoint=True)) <= 64 * 16


def test_checkpointed_dropout_drops_the_same_twice():
    block = TransformerBlock(16, 2, dropout=0.5, checkpoint=True).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    (slope,) = torch.autograd.grad(block(x).sum(), x)
    step = torch.randn_like(x) * 1e-6
    values = []
    for moved in (x + step, x - step):
        torch.manual_seed(3)
        values.append(block(moved).sum())
    torch.testing.assert_close((values[0] - values[1]) / 2, (slope * step).sum(), rtol=1e-4, atol=1e-12)


def test_dropout_is_off_in_eval_and_on_in_training():
    block = TransformerBlock(16, 2, dropout=0.5)
    x = torch.randn(2, 7, 16)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_the_hidden_layer_may_have_a_dropout_of_its_own():
    rates = [
        TransformerBlock(12, heads=3, dropout=0.5, **options).feed_forward.dropout.p
        for options in ({}, {"hidden_dropout": 0.0}, {"hidden_dropout": 0.25})
    ]
    assert rates == [0.5, 0.0, 0.25]


def test_block_reads_a_cache_step_by_step():
    block = TransformerBlock(15, 3, cross=True).eval()
    x, context = torch.randn(2, 7, 15), torch.randn(2, 11, 15)
    with torch.no_grad():
        whole = block(x, context, causal=True)
        cache, remembered = KVCache(7), block.cross_attention.remember(context)
        steps = [
            block(piece, causal=True, cache=cache, context_cache=remembered)
            for piece in x.split([3, 1, 1, 2], 1)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_block_compiles_whole(checkpoint):
    block = TransformerBlock(16, 2, gated=True, activation="silu", checkpoint=checkpoint)
    x = torch.randn(2, 7, 16, requires_grad=True)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    out = compiled(x, causal=True)
    torch.testing.assert_close(out, block(x, causal=True))
    out.sum().backward()
    assert x.grad is not None


def test_block_under_autocast():
    block = TransformerBlock(16, 2, checkpoint=True)
    x = torch.randn(2, 7, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = block(x)
    out.float().sum().backward()
    torch.testing.assert_close(out.float(), block(x), atol=0.1, rtol=0.1)
    assert x.grad.isfinite().all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="norm: expected 'pre' or 'post', got 'layer'"):
        TransformerBlock(15, 3, norm="layer")
    with pytest.raises(ValueError, match=r"activation: expected a function or one of relu.* got 'swish2'"):
        TransformerBlock(15, 3, activation="swish2")
    with pytest.raises(TypeError, match="activation: expected a function or a name, got int"):
        TransformerBlock(15, 3, activation=3)
    with pytest.raises(ValueError, match="d_hidden: expected at least 1, got 0"):
        TransformerBlock(15, 3, d_hidden=0)
    with pytest.raises(ValueError, match="d_context: got 7 for a block without cross-attention"):
        TransformerBlock(15, 3, d_context=7)
    with pytest.raises(ValueError, match="heads"):
        TransformerBlock(15, 4)
    with pytest.raises(TypeError, match="colour"):
        TransformerBlock(15, 3, colour="red")
    x = torch.randn(2, 7, 15)
    with pytest.raises(ValueError, match=r"x: expected \(batch, length, 15\), got \(2, 7, 14\)"):
        TransformerBlock(15, 3)(x[..., 1:])
    with pytest.raises(ValueError, match="context: got one, but this block has no cross-attention"):
        TransformerBlock(15, 3)(x, x)
    with pytest.raises(ValueError, match="context: expected one"):
        TransformerBlock(15, 3, cross=True)(x)
