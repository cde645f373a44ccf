"""Modules that read the width of all their heads off their input are cut like any other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import manyheads as mh
from manyheads.common.compare_outputs import relative_difference
from manyheads.models.reported_width import Reshaped, Width, reporting, width_of


class FromInput(nn.Module):
    """Attention as it is often written by hand: the width of its input is that of all heads."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = 3, 15
        self.c_attn, self.c_proj = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            y.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for y in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(15), FromInput()

    def forward(self, x):
        return x + self.attn(self.norm(x))


def make():
    torch.manual_seed(7)
    return nn.Sequential(Block(), Block()).eval()


X = torch.randn(2, 7, 15, generator=torch.Generator().manual_seed(1))
HEADS = {"0.attn": [1], "1.attn": [0, 2]}


def silenced(model, heads):
    with torch.no_grad(), mh.silence(model, heads):
        return model(X)


def test_the_cut_model_gives_what_the_silenced_one_gives():
    model = make()
    small = mh.cut(model, HEADS, X)
    assert small[0].attn.c_attn.weight.shape == (30, 15)
    assert small[1].attn.c_proj.weight.shape == (15, 5)
    assert relative_difference(silenced(model, HEADS), small(X)) < 1e-6
    assert width_of(model[0].attn) is None


def test_it_can_be_cut_again_copied_and_trained():
    model = make()
    twice = mh.cut(mh.cut(model, {0: [1]}, X), {0: [1]}, X)
    assert twice.original_heads == {"0.attn": [0]}
    assert relative_difference(silenced(model, {0: [1, 2]}), copy.deepcopy(twice)(X)) < 1e-6
    twice(X).square().sum().backward()
    assert twice[0].attn.c_attn.weight.grad.abs().sum() > 0


def test_it_is_saved_and_loaded(tmp_path):
    small = mh.cut(make(), HEADS, X)
    mh.save(small, tmp_path / "small")
    assert torch.equal(mh.load(tmp_path / "small", factory=make)(X), small(X))


@pytest.mark.filterwarnings("ignore")  # of torch's compiler and exporter
def test_it_compiles_and_exports():
    small = mh.cut(make(), HEADS, X)
    with torch.no_grad():
        assert relative_difference(small(X), torch.export.export(small, (X,)).module()(X)) < 1e-6
        assert relative_difference(small(X), torch.compile(small, backend="eager", fullgraph=True)(X)) < 1e-6
    torch.compiler.reset()


def test_what_stands_for_a_tensor_is_computed_with_as_that_tensor():
    x = torch.arange(6.0).view(2, 3)
    other = Reshaped(x, torch.Size((2, 5)))
    assert other.shape == other.size() == (2, 5)
    assert other.size(1) == 5
    assert torch.equal(2 * other + other[0] - other.sum(), 2 * x + x[0] - x.sum())
    assert torch.equal(F.linear(other, torch.eye(3)), x)
    assert torch.equal(torch.cat([other, x]), torch.cat([x, x]))
    assert copy.deepcopy(other).shape == (2, 5)


def test_only_inputs_of_that_width_say_another_and_only_for_the_time():
    width, layer = Width(before=3, after=2), nn.Identity()
    assert width.with_width(torch.ones(2, 5, 4)).shape == (2, 5, 4)
    assert width.with_width(torch.ones(5, 3)).shape == (5, 3)
    with reporting(layer, {"": width}):
        assert layer(torch.ones(2, 5, 3)).shape == (2, 5, 2)
    assert layer(torch.ones(2, 5, 3)).shape == (2, 5, 3)
