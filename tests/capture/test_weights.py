"""Which weights belong to which head, held against what the models' own code says."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import tokens
from torch import nn

from manyheads.capture.weights import Part, projections, weights
from manyheads.nn.transformers import Encoder


def test_separate_projections():
    model = models.bert()
    found = projections(model, tokens())["encoder.layer.1.attention.self"]
    head = found.heads[1]
    rows, path = tuple(range(5, 10)), "encoder.layer.1.attention."
    assert head.query == (Part(f"{path}self.query.weight", 0, rows),)
    assert head.biases["key"] == (Part(f"{path}self.key.bias", 0, rows),)
    assert head.output == (Part(f"{path}output.dense.weight", 1, rows),)
    assert head.extras == ()
    assert found.readers == (f"{path}output.dense.weight",)
    assert (found.d_key, found.d_value) == (5, 5)
    own = model.encoder.layer[1].attention
    assert torch.equal(weights(model, head.value), own.self.value.weight[5:10])
    assert torch.equal(weights(model, head.output), own.output.dense.weight[:, 5:10].T)


def test_packed_and_transposed():
    head = projections(models.gpt2(), tokens())["transformer.h.0.attn"].heads[2]
    assert head.query == (Part("transformer.h.0.attn.c_attn.weight", 1, tuple(range(10, 15))),)
    assert head.value == (Part("transformer.h.0.attn.c_attn.weight", 1, tuple(range(40, 45))),)
    assert head.output == (Part("transformer.h.0.attn.c_proj.weight", 0, tuple(range(10, 15))),)


def test_interleaved():
    head = projections(models.bloom(), tokens())["h.0.self_attention"].heads[1]
    assert head.key == (Part("h.0.self_attention.query_key_value.weight", 0, tuple(range(20, 25))),)


def test_groups_share_their_keys():
    found = projections(models.llama(), tokens())["model.layers.0.self_attn"]
    assert found.heads[2].key == found.heads[3].key != found.heads[4].key
    axis, users = found.users["model.layers.0.self_attn.k_proj.weight"]
    assert axis == 0
    assert users[4] == {2, 3}
    assert users[0] == {0, 1}
    assert found.users["model.layers.0.self_attn.o_proj.weight"][1][23] == {5}


def test_one_key_head_for_all():
    found = projections(models.llama(num_key_value_heads=1), tokens())["model.layers.0.self_attn"]
    assert found.heads[3].value == (Part("model.layers.0.self_attn.v_proj.weight", 0, (0, 1, 2, 3)),)
    assert "model.layers.0.self_attn.v_proj.weight" not in found.users


def test_sinks_and_tables_are_extras():
    found = projections(models.gpt_oss(), tokens())["layers.1.self_attn"]
    assert found.heads[4].extras == (Part("layers.1.self_attn.sinks", 0, (4,)),)
    batch = {**tokens(), "decoder_input_ids": tokens()["input_ids"][:, :5]}
    found = projections(models.t5(), batch)
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for layer in (0, 1):  # the second is handed the first one's
        assert found[f"encoder.block.{layer}.layer.0.SelfAttention"].heads[1].extras == (
            Part(table, 1, (1,)),
        )


class Scaled(nn.Module):
    """A number on the way from each head to the output, a gate made of the input, and per-head norms."""

    def __init__(self):
        super().__init__()
        self.packed, self.gate, self.output = nn.Linear(6, 18), nn.Linear(6, 2), nn.Linear(6, 7)
        self.scales, self.norm = nn.Parameter(torch.ones(2)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, 2, 3)).unbind(-3)
        q = q * self.norm
        out = nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(
            1, 2
        )
        out = out * self.scales[:, None] * self.gate(x).sigmoid().unsqueeze(-1)
        return self.output(out.flatten(2)).tanh()


def test_scales_gates_and_norms_of_a_head_are_found():
    found = projections(Scaled(), torch.randn(2, 5, 6))[""]
    users = {name: (axis, [set(heads) for heads in each]) for name, (axis, each) in found.users.items()}
    assert users["scales"] == (0, [{0}, {1}]) == users["gate.bias"]
    assert users["gate.weight"] == (0, [{0}, {1}]) == users["norm"]
    assert users["output.weight"] == (1, [{0}] * 3 + [{1}] * 3)
    assert "output.bias" not in users


def test_the_model_is_left_as_it_was():
    model = models.bert().train()
    model.embeddings.word_embeddings.weight.requires_grad_(False)
    state = torch.get_rng_state()
    projections(model, tokens())
    assert model.training
    assert model.encoder.layer[0].attention.self.training
    assert not model.embeddings.word_embeddings.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_values_made_of_zeros_show_their_weights():
    """As in DETR, whose decoder begins with zeros and positions."""

    class FromZeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.value, self.output = (nn.Linear(15, 15) for _ in range(3))

        def forward(self, x):
            split = ((x, self.query), (x, self.query), (torch.zeros_like(x), self.value))
            q, k, v = (layer(y).unflatten(-1, (3, 5)).transpose(1, 2) for y, layer in split)
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.output(out.transpose(1, 2).flatten(2))

    head = projections(FromZeros(), torch.randn(2, 7, 15))[""].heads[1]
    assert head.value == (Part("value.weight", 0, tuple(range(5, 10))),)
    assert head.output == (Part("output.weight", 1, tuple(range(5, 10))),)


def test_checkpointed_blocks_show_their_weights():
    """A checkpoint gives up the history of what it computes; ours must not be among it."""
    plain, checkpointed = (
        Encoder(15, heads=3, layers=2, vocabulary=models.VOCABULARY, checkpoint=checkpoint).train()
        for checkpoint in (False, True)
    )
    ids = tokens()["input_ids"]
    found = projections(checkpointed, ids)
    assert {name: mine.heads for name, mine in found.items()} == {
        name: mine.heads for name, mine in projections(plain, ids).items()
    }
    assert found["blocks.1.attention"].heads[2].query[0].indices == tuple(range(10, 15))


def test_shared_weights_are_found_at_each_call():
    found = projections(models.albert(), tokens())
    assert len(found) == 3
    first, *others = (mine.heads[1].query for mine in found.values())
    assert all(other == first for other in others)
    assert len(first[0].indices) == 5


@pytest.mark.parametrize("width", [5, 7])
def test_products_written_by_einsum(width):
    class Einsum(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(6, 3, width)) for _ in range(4))

        def forward(self, x):
            q, k, v = (torch.einsum("bld,dhw->bhlw", x, w) for w in (self.q, self.k, self.v))
            p = torch.einsum("bhqw,bhkw->bhqk", q, k).softmax(-1)
            return torch.einsum("bhlw,dhw->bld", torch.einsum("bhqk,bhkw->bhqw", p, v), self.o)

    head = projections(Einsum(), torch.randn(2, 5, 6))[""].heads[2]
    assert head.query == (Part("q", 1, (2,)),)
    assert head.output == (Part("o", 1, (2,)),)
