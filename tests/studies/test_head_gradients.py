"""Different, and less alike than at the start: two questions, four answers."""

import pytest
import torch

from manyheads.nn.transformers import Decoder
from manyheads.studies.head_gradients import verdict, weight_cosine
from manyheads.studies.head_weights import make_equal
from manyheads.studies.result import Result


def result(start, end):
    rows = [
        {"seed": seed, "step": step, "gate_cosine": value, "weight_cosine": 0.0}
        for step, values in ((0, start), (99, end))
        for seed, value in enumerate(values)
    ]
    return Result("head_gradients", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ([0.4, 0.41, 0.42], [0.2, 0.21, 0.22], "holds"),
        ([0.1, 0.11, 0.12], [0.2, 0.21, 0.22], "holds in part"),
        ([0.9, 0.91, 0.92], [0.8, 0.81, 0.82], "holds in part"),
        ([0.7, 0.71, 0.72], [0.8, 0.81, 0.82], "does not hold"),
        ([0.2, 0.3, 0.1], [0.1, 0.3, 0.2], "cannot be told"),
        ([0.9, 0.91, 0.92], [0.2, 0.5, 0.8], "cannot be told"),
    ],
)
def test_verdict(start, end, expected):
    assert verdict(result(start, end)).verdict == expected


def test_equal_heads_have_equal_gradients():
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocabulary=31)
    ids = torch.randint(31, (2, 7))
    model(ids).square().sum().backward()
    assert weight_cosine(model) < 0.9
    make_equal(model)
    model.zero_grad()
    model(ids).square().sum().backward()
    assert weight_cosine(model) == pytest.approx(1.0, abs=1e-4)
