"""The verdict counts what the numbers show: saturation, gradient, loss."""

import pytest

from manyheads.studies.result import Result
from manyheads.studies.scaled_scores import verdict


def result(entropy, gradient, worse):
    scaled = {"d_key": 64, "scaled": True, "entropy": 0.9, "gradient": 0.1}
    without = {"d_key": 64, "scaled": False, "entropy": 0.9 * entropy, "gradient": 0.1 * gradient}
    rows = [scaled | {"seed": seed, "loss": 2.0 + 0.01 * seed} for seed in range(3)]
    rows += [without | {"seed": seed, "loss": 2.0 + 0.01 * seed + worse[seed]} for seed in range(3)]
    return Result("scaled_scores", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.1, 0.2, [0.2, 0.21, 0.22]), "holds"),
        ((0.1, 0.7, [0.2, 0.21, 0.22]), "holds in part"),
        ((0.1, 0.2, [-0.2, 0.2, 0.1]), "holds in part"),
        ((0.9, 0.9, [0.0, 0.01, -0.01]), "does not hold"),
    ],
)
def test_verdict(numbers, expected):
    assert verdict(result(*numbers)).verdict == expected
