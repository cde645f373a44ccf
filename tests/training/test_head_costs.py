"""Scores and prices against plain computations."""

import math

import pytest
import torch
from torch import nn

import manyheads as mh
from manyheads.training.head_costs import cost, losses_without, noise, observe_heads


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def test_scores_are_the_gradients_of_gates():
    torch.manual_seed(0)
    model = mh.Decoder(15, heads=3, layers=2, vocabulary=23, dropout=0.3).double()
    batches = [torch.randint(23, (5, 7)), torch.randint(23, (3, 11))]
    weight = model.blocks[0].attention.query.weight
    seen = observe_heads(model, loss_of, batches)
    assert model.training
    assert weight.requires_grad
    assert weight.grad is None
    model.eval()
    wanted = {name: torch.zeros(3, dtype=torch.float64) for name in seen.scores}
    for ids in batches:
        values = {name: torch.ones(len(ids), 3, dtype=torch.float64, requires_grad=True) for name in wanted}
        with mh.gates(model, values):
            loss_of(model, ids).backward()
        for name, gate in values.items():
            wanted[name] += gate.grad.abs().sum(0) / len(batches)
    for name, scores in wanted.items():
        torch.testing.assert_close(seen.scores[name], scores, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(
        seen.losses, torch.stack([loss_of(model, ids).detach() for ids in batches]), rtol=1e-6, atol=0
    )


def test_prices_are_paired():
    torch.manual_seed(1)
    model = mh.Decoder(15, heads=3, layers=1, vocabulary=23)
    batches = [torch.randint(23, (4, 9)) for _ in range(3)]
    with_all = losses_without(model, loss_of, batches, {})
    without = losses_without(model, loss_of, batches, {"blocks.0.attention": [1]})
    price = cost(without, with_all)
    differences = [a - b for a, b in zip(without.tolist(), with_all.tolist(), strict=True)]
    mean = sum(differences) / 3
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert price.mean == pytest.approx(mean)
    assert price.error == pytest.approx(spread / math.sqrt(3))
    assert cost(without[:1], with_all[:1]).error == math.inf


def test_noise_is_that_of_independent_losses_and_no_trend():
    generator = torch.Generator().manual_seed(0)
    values = 2 + 0.3 * torch.randn(4000, generator=generator, dtype=torch.float64)
    expected = 0.3 / math.sqrt(4000)
    assert noise(values.tolist()) == pytest.approx(expected, rel=0.1)
    falling = values - torch.linspace(0, 5, 4000)
    assert noise(falling.tolist()) == pytest.approx(expected, rel=0.1)
    assert noise([1.0]) == noise([]) == 0.0
    assert noise([3.0, 2.0, 1.0]) == 0.0
