"""The narrowest heads and those just below 64 decide."""

import pytest

from manyheads.studies.head_width import verdict
from manyheads.studies.result import Result


def result(narrow, below, wide=(2.0, 2.01, 2.02)):
    losses = {1: narrow, 16: [2.3, 2.3, 2.3], 32: below, 64: wide}
    rows = [
        {"fixed": fixed, "d_key": d_key, "seed": seed, "loss": loss + (fixed == "d_model"), "parameters": 1}
        for fixed in ("heads", "d_model")
        for d_key, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return Result("head_width", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("narrow", "below", "expected"),
    [
        ([2.5, 2.51, 2.52], [2.1, 2.11, 2.12], "holds"),
        ([2.5, 2.51, 2.52], [2.0, 2.01, 2.02], "holds in part"),
        ([2.0, 2.01, 2.02], [2.0, 2.01, 2.02], "does not hold"),
        ([2.5, 2.51, 2.52], [2.2, 1.9, 2.1], "cannot be told"),
        ([2.5, 1.5, 2.2], [2.0, 2.01, 2.02], "cannot be told"),
    ],
)
def test_verdict(narrow, below, expected):
    assert verdict(result(narrow, below)).verdict == expected


def test_the_best_width_at_a_fixed_d_model_is_named():
    judgement = verdict(result([2.5, 2.5, 2.5], [1.8, 1.8, 1.8]))
    assert "the best width is 32" in judgement.because.en
