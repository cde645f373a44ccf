"""A model becomes its cut or grown copy, and the optimiser's moments and averages follow entry by entry."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers import models
from tests.helpers.cut_models import BOTH, IDS, MODELS, chosen, torch_encoder
from tests.helpers.models import tokens
from torch import nn

import manyheads as mh
from manyheads.common.compare_outputs import relative_difference
from manyheads.common.run_batch import run
from manyheads.surgery.in_place import become

KINDS = ["gpt2", "llama", "bert", "nn.TransformerEncoder", "Decoder", "Encoder"]


def with_moments(model, **options):
    """An optimiser whose moments are the weights themselves: cut weights must then equal cut moments."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    for parameter in model.parameters():
        moments = {"exp_avg": parameter.detach().clone(), "exp_avg_sq": parameter.detach().square()}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    return optimizer


def learn(model, batch, optimizer):
    """One update, whatever the model returns."""
    outputs = run(model, batch)
    leaves = outputs.values() if isinstance(outputs, dict) else [outputs]
    loss = sum(x.float().square().mean() for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_moments_and_averages_follow_a_cut_in_any_model(kind):
    make, batch = MODELS[kind]
    model = make().eval()
    optimizer, average = with_moments(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.9)
    plain = {name: value.detach().clone() for name, value in average.named_parameters()}
    before, modules = dict(model.named_parameters()), dict(model.named_modules())
    heads = chosen(model, batch)
    small = mh.cut(model, heads, batch)
    become(model, small, optimizer, [average, plain])
    with torch.no_grad():
        assert relative_difference(run(model, batch), run(small, batch)) == 0.0
        run(average, batch)
    assert model.original_heads == small.original_heads
    after = dict(model.named_parameters())
    assert [p.shape for p in after.values()] == [p.shape for p in small.parameters()]
    for name, parameter in after.items():
        state = optimizer.state[parameter]
        assert name not in before or parameter is before[name]
        assert torch.equal(state["exp_avg"], parameter)
        assert torch.equal(state["exp_avg_sq"], parameter.square())
        assert state["step"] == 7.0
        assert torch.equal(plain[name], 0.9 * parameter), name
        assert torch.equal(average.get_parameter(name), 0.9 * parameter), name
    for path, module in model.named_modules():
        assert kind == "nn.TransformerEncoder" or module is modules.get(path, module)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in after.values()}
    assert len(held) == len(after) == len(optimizer.state)
    learn(model.train(), batch, optimizer)


@pytest.mark.parametrize("how", ["zero", "split"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "nn.TransformerEncoder", "Decoder"])
def test_moments_of_new_heads_are_zero(kind, how):
    make, batch = MODELS[kind]
    model = make().eval()
    optimizer, average = with_moments(model), copy.deepcopy(model)
    site = next(iter(mh.importance(model, [batch], method="random")["site"]))
    size = 2 if kind in ("llama", "Decoder") else 1
    with torch.no_grad():
        wanted = run(model, batch)
    become(model, mh.grow(model, {site: size}, batch, how=how), optimizer, [average])
    with torch.no_grad():
        assert relative_difference(run(model, batch), wanted) < 1e-5
        assert relative_difference(run(average, batch), wanted) < 1e-5  # it was like the model
    zeros = 0
    for parameter in model.parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert moment.shape == parameter.shape
        new = (moment == 0) & (parameter != 0)
        zeros += int(new.sum())
        if how == "zero":
            assert torch.equal(moment[~new], parameter[~new])
    assert zeros > 0
    learn(model.train(), batch, optimizer)


def test_cut_heads_leave_the_updates_of_the_others_alone():
    """Heads that nothing reads may go at any time: training goes on as with them."""
    torch.manual_seed(3)
    one = mh.Decoder(20, heads=5, layers=2, vocabulary=models.VOCABULARY).double()
    with torch.no_grad():
        for block in one.blocks:
            block.attention.output.weight[:, 4:8] = 0.0  # of head 1
    other = copy.deepcopy(one)
    both = [(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)) for model in (one, other)]
    for number in range(4):
        for model, optimizer in both:
            loss = learn(model, IDS, optimizer)
            with torch.no_grad():
                for block in one.blocks:
                    block.attention.output.weight[:, 4:8] = 0.0
                if other.blocks[0].attention.heads == 5:
                    for block in other.blocks:
                        block.attention.output.weight[:, 4:8] = 0.0
        if number == 1:  # `loss`, and with it the graph of the old shapes, is still there
            become(other, mh.cut(other, {0: [1], 1: [1]}, IDS), both[1][1])
    assert loss.requires_grad
    rows = [*range(4), *range(8, 20)]
    for mine, theirs in zip(other.blocks, one.blocks, strict=True):
        torch.testing.assert_close(mine.attention.query.weight, theirs.attention.query.weight[rows])
        torch.testing.assert_close(mine.feed_forward.up.weight, theirs.feed_forward.up.weight)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_follow(backend):
    torch._dynamo.reset()
    model = mh.Decoder(12, heads=3, layers=1, vocabulary=models.VOCABULARY)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    learn(compiled, IDS, optimizer)
    become(model, mh.cut(model, {0: [1]}, IDS), optimizer)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(IDS), model(IDS))
    learn(compiled, IDS, optimizer)
    torch.testing.assert_close(compiled(IDS), model(IDS))
    torch._dynamo.reset()


def test_groups_of_the_optimiser_stay():
    model = torch_encoder().train()
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    packed = [p for name, p in model.named_parameters() if "in_proj" in name]
    others = [p for p in model.parameters() if not any(p is q for q in norms + packed)]
    groups = [{"params": packed, "lr": 0.5}, {"params": norms}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    x = torch.randn(2, 5, 15)
    learn(model, x, optimizer)
    become(model, mh.cut(model.eval(), {0: [1]}, x), optimizer)
    first = model.layers[0].self_attn
    inside = [id(p) for p in optimizer.param_groups[0]["params"]]
    wanted = [first.query, first.key, first.value]
    assert set(inside[:6]) == {id(p) for module in wanted for p in module.parameters()}
    assert inside[6:] == [id(p) for p in packed[2:]]
    assert id(first.output.weight) in [id(p) for p in optimizer.param_groups[2]["params"]]
    assert optimizer.param_groups[1]["params"] == norms
    assert optimizer.state[first.key.weight]["step"] == 1.0
    learn(model.train(), x, optimizer)


class Rows(torch.optim.SGD):
    """An optimiser that keeps a number for each row, without the axes that are gone."""


def test_a_state_that_cannot_follow_is_refused_before_anything_changes():
    model = mh.Decoder(12, heads=3, layers=1, vocabulary=models.VOCABULARY)
    optimizer = Rows(model.parameters(), lr=0.1)
    weight = model.blocks[0].attention.output.weight
    optimizer.state[weight] = {"rows": torch.ones(12)}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"its state 'rows' of blocks.0.attention.output.weight is \(12,\)"):
        become(model, mh.cut(model, {0: [1]}, IDS), optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    factored = torch.optim.Adafactor(model.parameters(), lr=0.1)
    learn(model, IDS, factored)
    become(model, mh.cut(model, {0: [1]}, IDS), factored)
    learn(model, IDS, factored)
    assert factored.state[weight]["col_var"].shape == (1, 8)


def test_a_model_that_neither_cut_nor_grow_made_is_refused():
    model = mh.Decoder(12, heads=3, layers=1, vocabulary=models.VOCABULARY)
    with pytest.raises(ValueError, match="expected what cut or grow returned"):
        become(model, copy.deepcopy(model))


def test_t5_tables_that_were_shared_are_learned_by_each_layer():
    model = models.t5().eval()
    optimizer = with_moments(model)
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    heads = {"encoder.block.1.layer.0.SelfAttention": [0]}
    small = mh.cut(model, heads, BOTH)
    become(model, small, optimizer)
    new = [name for name, _ in model.named_parameters() if name.endswith("relative_attention_bias.weight")]
    assert table in new
    for name in new:
        parameter = model.get_parameter(name)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], parameter)
    assert len({id(model.get_parameter(name)) for name in new}) == len(new) > 2
    learn(model.train(), BOTH, optimizer)


def test_hooks_and_references_of_the_caller_stay():
    model = models.bert().eval()
    layer, seen = model.encoder.layer[0].attention.self, []
    layer.register_forward_hook(lambda module, args, output: seen.append(output[0].shape))
    weight: nn.Parameter = layer.query.weight
    become(model, mh.cut(model, {0: [1]}, tokens()))
    seen.clear()
    with torch.no_grad():
        model(**tokens())
    assert seen[0][-1] == 10
    assert layer.query.weight is weight
    assert layer.query.out_features == weight.shape[0] == 10
