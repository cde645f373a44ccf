"""The same weights in torch's and transformers' models give the same hidden states, layer by layer."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.nn import mask
from manyheads.nn.blocks import TransformerBlock
from manyheads.nn.positions import Rotary
from manyheads.nn.transformers import Decoder, Encoder

same = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
LENGTHS = torch.tensor([13, 7, 2])
REAL = torch.arange(13) < LENGTHS[:, None]  # (batch, length): True at tokens, False at padding


def randomise(module):
    """Weights large enough that every part shows in the result, norms and biases included."""
    for name, parameter in module.named_parameters():
        vector = parameter.dim() == 1
        std = 0.3 if vector else parameter.shape[-1] ** -0.5
        nn.init.normal_(parameter, mean=1.0 if vector and "weight" in name else 0.0, std=std)
    return module.eval()


def fill(module, weight, bias=None):
    """Copy into a linear, a norm or an embedding of ours."""
    assert module.weight.shape == weight.shape
    assert (bias is None) == (getattr(module, "bias", None) is None)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)


def fill_from(pairs):
    for ours, theirs in pairs:
        fill(ours, theirs.weight, getattr(theirs, "bias", None))


def fill_packed(attention, weight, bias, output_weight, output_bias):
    parts = zip(weight.chunk(3), bias.chunk(3), strict=True)
    for ours, (w, b) in zip((attention.query, attention.key, attention.value), parts, strict=True):
        fill(ours, w, b)
    fill(attention.output, output_weight, output_bias)


def fill_block_from_torch(block, layer):
    pairs = [(block.attention, layer.self_attn)]
    norms = [block.attention_norm, block.feed_forward_norm]
    if block.cross_attention is not None:
        pairs.append((block.cross_attention, layer.multihead_attn))
        norms.insert(1, block.cross_norm)
    for ours, theirs in pairs:
        out = theirs.out_proj
        fill_packed(ours, theirs.in_proj_weight, theirs.in_proj_bias, out.weight, out.bias)
    fill_from(zip(norms, [getattr(layer, f"norm{i + 1}") for i in range(len(norms))], strict=True))
    fill_from([(block.feed_forward.up, layer.linear1), (block.feed_forward.down, layer.linear2)])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torch_encoder_layers(norm, causal, activation):
    options = {"dim_feedforward": 29, "activation": activation, "norm_first": norm == "pre"}
    layers = [randomise(nn.TransformerEncoderLayer(15, 3, batch_first=True, **options)) for _ in range(3)]
    ours = Encoder(15, 3, 3, positions="none", d_hidden=29, activation=activation, norm=norm).eval()
    for block, layer in zip(ours.blocks, layers, strict=True):
        fill_block_from_torch(block, layer)
    x = torch.randn(3, 13, 15)
    _, hidden = ours(x, lengths=LENGTHS, mask=mask.causal() if causal else None, return_hidden=True)
    hide = torch.ones(13, 13, dtype=torch.bool).triu(1) if causal else None
    expected = x
    for layer, got in zip(layers, hidden[1:], strict=True):
        expected = layer(expected, src_mask=hide, src_key_padding_mask=~REAL)
        same(got[REAL], expected[REAL])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_torch_decoder_layers(norm):
    options = {"dim_feedforward": 29, "norm_first": norm == "pre", "layer_norm_eps": 1e-3}
    layers = [randomise(nn.TransformerDecoderLayer(15, 3, batch_first=True, **options)) for _ in range(3)]
    ours = [
        TransformerBlock(15, 3, d_hidden=29, activation="relu", norm=norm, norm_eps=1e-3, cross=True).eval()
        for _ in range(3)
    ]
    x, context = torch.randn(3, 11, 15), torch.randn(3, 13, 15)
    got = expected = x
    hide = torch.ones(11, 11, dtype=torch.bool).triu(1)
    for block, layer in zip(ours, layers, strict=True):
        fill_block_from_torch(block, layer)
        got = block(got, context, causal=True, context_mask=mask.padding(LENGTHS))
        expected = layer(expected, context, tgt_mask=hide, memory_key_padding_mask=~REAL)
        same(got, expected)


def ids():
    return torch.randint(101, (3, 13), generator=torch.Generator().manual_seed(7))


def test_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=101,
        hidden_size=20,
        num_hidden_layers=3,
        num_attention_heads=5,
        intermediate_size=37,
        max_position_embeddings=17,
        attn_implementation="sdpa",
    )
    theirs = randomise(transformers.BertModel(config, add_pooling_layer=False))
    ours = Encoder(20, 5, 3, positions="none", d_hidden=37, norm="post", norm_eps=config.layer_norm_eps)
    for block, layer in zip(ours.eval().blocks, theirs.encoder.layer, strict=True):
        own = layer.attention.self
        fill_from(
            [
                (block.attention.query, own.query),
                (block.attention.key, own.key),
                (block.attention.value, own.value),
                (block.attention.output, layer.attention.output.dense),
                (block.attention_norm, layer.attention.output.LayerNorm),
                (block.feed_forward.up, layer.intermediate.dense),
                (block.feed_forward.down, layer.output.dense),
                (block.feed_forward_norm, layer.output.LayerNorm),
            ]
        )
    expected = theirs(ids(), attention_mask=REAL.long(), output_hidden_states=True)
    out, hidden = ours(expected.hidden_states[0], lengths=LENGTHS, return_hidden=True)
    assert len(hidden) == len(expected.hidden_states) == 4
    for got, wanted in zip(hidden, expected.hidden_states, strict=True):
        same(got[REAL], wanted[REAL])
    same(out[REAL], expected.last_hidden_state[REAL])


def same_language_model(ours, theirs):
    """Hidden states and logits with padding, then again in three pieces through the cache."""
    expected = theirs(ids(), attention_mask=REAL.long(), output_hidden_states=True)
    logits, hidden = ours(ids(), lengths=LENGTHS, return_hidden=True)
    assert len(hidden) == len(expected.hidden_states) == 4
    hidden[-1] = ours.norm(hidden[-1])  # theirs shows the last one after the norm
    for got, wanted in zip(hidden, expected.hidden_states, strict=True):
        same(got[REAL], wanted[REAL])
    same(logits[REAL], expected.logits[REAL])
    with torch.no_grad():
        expected = theirs(ids()).logits
        cache = ours.new_cache(13)
        pieces = [ours(piece, cache=cache) for piece in ids().split([7, 1, 5], dim=1)]
    same(torch.cat(pieces, dim=1), expected)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=17, n_embd=20, n_layer=3, n_head=5, attn_implementation="sdpa"
    )
    theirs = randomise(transformers.GPT2LMHeadModel(config))
    gelu = partial(F.gelu, approximate="tanh")
    ours = Decoder(20, 5, 3, vocabulary=101, positions="learned", max_length=17, activation=gelu).eval()
    body = theirs.transformer
    fill_from([(ours.embedding, body.wte), (ours.positions, body.wpe), (ours.norm, body.ln_f)])
    for block, layer in zip(ours.blocks, body.h, strict=True):
        packed, out = layer.attn.c_attn, layer.attn.c_proj
        fill_packed(block.attention, packed.weight.T, packed.bias, out.weight.T, out.bias)
        fill(block.feed_forward.up, layer.mlp.c_fc.weight.T, layer.mlp.c_fc.bias)
        fill(block.feed_forward.down, layer.mlp.c_proj.weight.T, layer.mlp.c_proj.bias)
        fill_from([(block.attention_norm, layer.ln_1), (block.feed_forward_norm, layer.ln_2)])
    same_language_model(ours, theirs)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_llama(kv_heads):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    theirs = randomise(transformers.LlamaForCausalLM(config))
    ours = Decoder(
        24,
        6,
        3,
        vocabulary=101,
        positions=Rotary(4, base=500.0),
        tied=False,
        kv_heads=kv_heads,
        d_hidden=37,
        activation="silu",
        gated=True,
        rms_norm=True,
        norm_eps=1e-4,
        bias=False,
    ).eval()
    body = theirs.model
    fill_from([(ours.embedding, body.embed_tokens), (ours.norm, body.norm), (ours.output, theirs.lm_head)])
    for block, layer in zip(ours.blocks, body.layers, strict=True):
        fill_from(
            [
                (block.attention.query, layer.self_attn.q_proj),
                (block.attention.key, layer.self_attn.k_proj),
                (block.attention.value, layer.self_attn.v_proj),
                (block.attention.output, layer.self_attn.o_proj),
                (block.attention_norm, layer.input_layernorm),
                (block.feed_forward.gate, layer.mlp.gate_proj),
                (block.feed_forward.up, layer.mlp.up_proj),
                (block.feed_forward.down, layer.mlp.down_proj),
                (block.feed_forward_norm, layer.post_attention_layernorm),
            ]
        )
    same_language_model(ours, theirs)
