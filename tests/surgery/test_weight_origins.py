"""What is kept beside the parameters follows them through a cut and a growth."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.cut_models import MODELS, chosen
from tests.helpers.models import gpt2, tokens
from torch import nn

import manyheads as mh
from manyheads.common.run_batch import run
from manyheads.surgery.weight_origins import carried, origins

NAMES = ("gpt2", "t5", "nn.TransformerEncoder", "Decoder", "Seq2Seq")


def all_added(model, batch):
    with torch.no_grad(), mh.watch(model) as seen:
        run(model, batch)
    return {
        site.name: site.heads // len(set(site.kv_heads)) * (1 + number % 2)
        for number, site in enumerate(seen.sites)
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_entries_that_stay_are_those_of_the_old_parameters(name):
    """Carried like a moment, the old weights are the new ones."""
    make, batch = MODELS[name]
    model = make().eval()
    old = dict(model.named_parameters())
    small = mh.cut(model, chosen(model, batch), batch)
    assert origins(small).keys() == dict(small.named_parameters()).keys()
    for parameter, origin in origins(small).items():
        assert torch.equal(carried(old[origin.parameter].detach(), origin), small.get_parameter(parameter))
    large = mh.grow(model, all_added(model, batch), batch)
    count = 0
    for parameter, origin in origins(large).items():
        moment, weight = (
            carried(old[origin.parameter].detach(), origin),
            large.get_parameter(parameter).detach(),
        )
        stay = [entry for entry in range(weight.shape[origin.axis]) if entry not in origin.new]
        index = torch.tensor(stay)
        assert torch.equal(moment.index_select(origin.axis, index), weight.index_select(origin.axis, index))
        if origin.new:
            assert moment.index_select(origin.axis, torch.tensor(origin.new)).abs().max() == 0
            count += 1
    assert count >= 3 * len(all_added(model, batch))


def test_the_parts_of_a_split_head_share_its_past():
    model, batch = gpt2().eval(), tokens()
    large = mh.grow(model, {0: [1]}, batch, how="split")
    origin = origins(large)["transformer.h.0.attn.c_attn.weight"]
    assert origin.new == ()
    assert origin.indices[:20] == (*range(10), *range(5, 15))
    assert origins(large)["transformer.wte.weight"].indices is None


def test_a_layer_without_heads_has_a_bias_without_a_past():
    layer, x = nn.TransformerEncoderLayer(15, 3, 11, batch_first=True).eval(), torch.randn(2, 5, 15)
    model = nn.Sequential(layer, nn.TransformerEncoderLayer(15, 3, 11, batch_first=True).eval())
    small = mh.cut(model, {0: [0, 1, 2]}, x)
    assert {
        name: origin.parameter for name, origin in origins(small).items() if name.startswith("0.self")
    } in (
        {},
        {"0.self_attn.bias": None},
    )


def test_models_that_were_not_changed_have_none():
    with pytest.raises(ValueError, match=r"expected what cut or grow returned, got a GPT2LMHeadModel"):
        origins(gpt2())
