"""Three conditions decide: against one head, against the average, against tied heads."""

import pytest
import torch
from torch import nn

from manyheads.studies.head_ensemble import Ensemble, verdict
from manyheads.studies.result import Result

FREE = [2.0, 2.01, 2.02]


def shifted(by):
    return [loss + by for loss in FREE]


def result(one, average, tied):
    rows = [
        {"model": kind, "seed": seed, "loss": loss} | more(seed)
        for kind, losses, more in (
            ("average of one-head models", average, lambda seed: {"member_loss": one[seed]}),
            ("several heads", FREE, lambda seed: {"cka": 0.2}),
            ("tied heads", tied, lambda seed: {"cka": 1.0}),
        )
        for seed, loss in enumerate(losses)
    ]
    return Result("head_ensemble", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("one", "average", "tied", "expected"),
    [
        (shifted(0.2), shifted(0.1), shifted(0.1), "holds"),
        (shifted(0.2), shifted(-0.001), shifted(0.1), "holds"),
        (shifted(0.2), shifted(-0.1), shifted(0.1), "holds in part"),
        (shifted(-0.1), shifted(-0.2), shifted(-0.1), "does not hold"),
        (shifted(-0.1), shifted(-0.2), [1.9, 2.1, 2.3], "cannot be told"),
    ],
)
def test_verdict(one, average, tied, expected):
    assert verdict(result(one, average, tied)).verdict == expected


def test_an_ensemble_averages_probabilities():
    members = [nn.Linear(3, 5), nn.Linear(3, 5)]
    x = torch.randn(2, 3)
    expected = torch.stack([member(x).softmax(-1) for member in members]).mean(0)
    torch.testing.assert_close(Ensemble(members)(x).exp(), expected)
