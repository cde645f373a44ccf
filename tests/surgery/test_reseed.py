"""Heads that begin anew count for nothing, and point where no other head does."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.cut_models import MODELS

import manyheads as mh
from manyheads.capture.weights import projections, weights
from manyheads.common.compare_outputs import relative_difference
from manyheads.common.run_batch import run
from manyheads.surgery.reseed import reseed

KINDS = ["gpt2", "llama", "t5", "nn.TransformerEncoder", "Decoder", "bloom"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reseeded_model_is_the_silenced_one(kind):
    make, batch = MODELS[kind]
    model = make().eval()
    found = projections(model, batch)
    heads = {name: [0, 1] if kind == "llama" else [1] for name in list(found)[:2]}
    with torch.no_grad(), mh.silence(model, heads):
        wanted = run(model, batch)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(parameter)}
    average = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reseed(model, found, heads, seed=5, optimizer=optimizer, averages=[average])
    with torch.no_grad():
        assert relative_difference(run(model, batch), wanted) < 1e-5
        assert relative_difference(run(average, batch), wanted) < 1e-5
    for name, numbers in heads.items():
        for head, parts in enumerate(found[name].heads):
            now, past = (
                weights(state, parts.query) for state in (model, _filled(copy.deepcopy(model), before))
            )
            assert torch.equal(now, past) == (head not in numbers)
            for part in parts.query:
                moments = optimizer.state[model.get_parameter(part.parameter)]["exp_avg"]
                at = moments.index_select(part.axis, torch.tensor(part.indices))
                assert bool((at == (0.0 if head in numbers else 1.0)).all())


def _filled(model, state):
    model.load_state_dict(state)
    return model


def test_new_directions_are_orthogonal_and_as_long_as_the_others():
    torch.manual_seed(2)
    model = mh.MultiHeadAttention(21, heads=3, d_key=5, d_value=4)
    x = torch.randn(2, 7, 21)
    found = projections(model, x)
    reseed(model, found, {"": [2]}, seed=1)
    for role in ("query", "key", "value"):
        rows = [weights(model, getattr(head, role)).double() for head in found[""].heads]
        others = torch.cat(rows[:2])
        assert (rows[2] @ others.T).abs().max() < 1e-6
        torch.testing.assert_close(rows[2].norm(dim=1), others.norm(dim=1).mean().expand(len(rows[2])))
    assert model.query.bias[10:].abs().max() == 0.0
    again = copy.deepcopy(model)
    reseed(again, found, {"": [2]}, seed=1)
    assert torch.equal(again.query.weight[10:], model.query.weight[10:])


def test_shared_keys_and_values_stay():
    torch.manual_seed(0)
    model = mh.MultiHeadAttention(12, heads=4, kv_heads=2)
    x, key = torch.randn(2, 5, 12), model.key.weight.detach().clone()
    found = projections(model, x)
    reseed(model, found, {"": [1]})
    assert torch.equal(model.key.weight, key)
    reseed(model, found, {"": [0, 1]})
    assert not torch.equal(model.key.weight[:3], key[:3])
    assert torch.equal(model.key.weight[3:], key[3:])
