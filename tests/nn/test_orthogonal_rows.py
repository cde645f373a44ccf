"""Orthogonal blocks of rows: the formula, its gradient, and how the parametrisation folds away."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from manyheads.nn.orthogonal_rows import (
    OrthogonalRows,
    constrained,
    fold_orthogonal,
    orthogonal_blocks,
    plain,
    polar,
)


def between(blocks):
    """The largest cosine between rows of different blocks (heads, width, columns)."""
    rows = nn.functional.normalize(blocks, dim=-1)
    products = torch.einsum("awc,bvc->abwv", rows, rows).abs()
    heads = len(blocks)
    return max(products[a, b].max().item() for a in range(heads) for b in range(heads) if a != b)


@pytest.mark.parametrize("shape", [(3, 2, 7), (3, 3, 9), (1, 2, 5), (5, 1, 5)])
def test_it_is_the_formula(shape):
    torch.manual_seed(0)
    rows = torch.randn(shape, dtype=torch.float64) * torch.rand(shape[0], 1, 1, dtype=torch.float64)
    flat = (rows / rows.norm(dim=(1, 2), keepdim=True)).flatten(0, 1)
    values, vectors = torch.linalg.eigh(flat @ flat.T)
    basis = (vectors @ torch.diag(values**-0.5) @ vectors.T @ flat).view(shape)
    wanted = torch.stack([w @ q.T @ q for w, q in zip(rows, basis, strict=True)])
    torch.testing.assert_close(orthogonal_blocks(rows), wanted, rtol=1e-8, atol=1e-9)


def test_the_gradient_is_that_of_small_steps():
    torch.manual_seed(1)
    for shape in [(2, 3, 7), (3, 2, 6)]:
        rows = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(orthogonal_blocks, (rows,), atol=1e-5)
    square = torch.eye(4, dtype=torch.float64).requires_grad_()  # equal singular values
    assert torch.autograd.gradcheck(polar, (square,), atol=1e-5)


def test_orthogonal_blocks_stay_and_scale_is_free():
    torch.manual_seed(2)
    rows = torch.randn(3, 2, 7, dtype=torch.float64)
    once = orthogonal_blocks(rows)
    torch.testing.assert_close(orthogonal_blocks(once), once)
    scaled = orthogonal_blocks(rows * torch.tensor([1.0, 100.0, 0.01])[:, None, None])
    torch.testing.assert_close(scaled, once * torch.tensor([1.0, 100.0, 0.01])[:, None, None])


@pytest.mark.parametrize("kind", ["twins", "nearly", "zero head"])
def test_dependent_rows_are_made_orthogonal_with_finite_gradients(kind):
    torch.manual_seed(3)
    rows = torch.randn(3, 2, 7, dtype=torch.float64)
    if kind == "twins":
        rows[1] = rows[0]
    elif kind == "nearly":
        rows[1] = rows[0] + 1e-9 * torch.randn(2, 7)
    else:
        rows[1] = 0.0
    rows.requires_grad_()
    blocks = orthogonal_blocks(rows)
    assert between(blocks.detach()) < 1e-8
    blocks.square().sum().backward()
    assert torch.isfinite(rows.grad).all()


def constrain(module):
    groups = [(0, [[0, 1], [2, 3]]), (0, [[5, 6], [4, 7]])]  # 8 and 9 belong to no head
    return parametrize.register_parametrization(module, "weight", OrthogonalRows(groups))


def test_only_the_rows_of_heads_change_and_steps_keep_them_orthogonal():
    torch.manual_seed(4)
    layer = nn.Linear(5, 10)
    before = layer.weight.detach().clone()
    constrain(layer)
    assert torch.equal(layer.weight[8:], before[8:])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(7):
        layer(torch.randn(3, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight = layer.weight.detach()
        assert between(torch.stack([weight[:2], weight[2:4]])) < 1e-5
        assert between(torch.stack([weight[5:7], weight[[4, 7]]])) < 1e-5


def test_low_precision_gets_a_gradient():
    layer = constrain(nn.Linear(5, 10).bfloat16())
    layer(torch.randn(3, 5).bfloat16()).sum().backward()
    assert layer.weight.dtype == layer.parametrizations.weight.original.grad.dtype == torch.bfloat16


def test_a_copy_folds_and_the_original_stays():
    torch.manual_seed(5)
    model = nn.Sequential(constrain(nn.Linear(5, 10)), nn.Linear(10, 2))
    x = torch.randn(3, 5)
    out, raw = model(x), model[0].parametrizations.weight.original.detach().clone()
    folded = plain(model)
    assert type(folded[0]) is nn.Linear
    assert sorted(folded.state_dict()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert torch.equal(folded(x), out)
    assert torch.equal(model(x), out)  # its class still has the property that computes the weight
    assert torch.equal(model[0].parametrizations.weight.original, raw)
    assert len(list(constrained(model))) == 1
    assert plain(folded) is folded


def test_folding_in_place_keeps_the_parameters():
    model = constrain(nn.Linear(5, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach()
    assert fold_orthogonal(model) is model
    assert torch.equal(model.weight, weight)
    assert any(model.weight is parameter for parameter in optimizer.param_groups[0]["params"])


def test_another_parametrisation_of_the_module_stays():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    model = constrain(nn.Linear(5, 10))
    parametrize.register_parametrization(model, "bias", Doubled())
    x = torch.randn(3, 5)
    other, out = copy.deepcopy(model), model(x)
    folded = plain(model)
    assert sorted(folded.state_dict()) == ["parametrizations.bias.original", "weight"]
    for each in (folded, model, other):
        assert torch.equal(each(x), out)
