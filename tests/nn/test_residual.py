"""Dropout on the stream: the right share, the right mean, the same numbers forward and backward."""

import pytest
import torch
from torch import nn

from manyheads.nn.residual import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.37])
def test_the_share_and_the_mean_are_right_in_every_lane(rate):
    torch.manual_seed(0)
    x = torch.ones(101, 4001, requires_grad=True)
    y = Dropout(rate)(x)
    assert y.mean().item() == pytest.approx(1.0, abs=0.01)
    for lane in range(4):  # four numbers share a draw
        dropped = y.flatten()[lane::4] == 0
        assert dropped.double().mean().item() == pytest.approx(rate, abs=0.01)
    assert y.max().item() == pytest.approx(1 / (1 - rate), abs=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_the_seed_decides_and_no_number_is_tied_to_another():
    x = torch.ones(3, 7, 1000, dtype=torch.float64)
    torch.manual_seed(1)
    one = Dropout(0.5)(x)
    two = Dropout(0.5)(x)
    torch.manual_seed(1)
    assert torch.equal(one, Dropout(0.5)(x))
    kept = torch.stack([one, two]).ne(0).double().flatten(0, 2)  # (42, 1000)
    apart = torch.corrcoef(kept)
    assert apart.fill_diagonal_(0).abs().max() < 0.2
    neighbours = torch.corrcoef(kept.reshape(-1, 4).T)
    assert neighbours.fill_diagonal_(0).abs().max() < 0.05


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e-6])
def test_rates_at_the_ends_are_torchs(rate):
    x = torch.randn(5, 11)
    torch.manual_seed(0)
    one = Dropout(rate)(x)
    torch.manual_seed(0)
    assert torch.equal(one, nn.Dropout(rate)(x))
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert Dropout(0.5)(torch.empty(0, 3)).shape == (0, 3)
    assert Dropout(0.5)(torch.ones(5, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
