"""Four comparisons decide, by their intervals."""

import pytest

from manyheads.studies.normalised_weights import verdict
from manyheads.studies.result import Result

SOFTMAX = [0.50, 0.51, 0.52]
LESS, MORE, UNCLEAR = [0.40, 0.41, 0.42], [0.60, 0.61, 0.62], [0.2, 0.5, 0.9]


def result(sigmoid, none):
    kinds = {"softmax": (SOFTMAX, SOFTMAX), "sigmoid": sigmoid, "none": none}
    rows = [
        {"weights": kind, "seed": seed, "weight_difference": one, "output_difference": other, "loss": 2.0}
        for kind, columns in kinds.items()
        for seed, (one, other) in enumerate(zip(*columns, strict=True))
    ]
    return Result("normalised_weights", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("sigmoid", "none", "expected"),
    [
        ((LESS, LESS), (LESS, LESS), "holds"),
        ((LESS, LESS), (MORE, UNCLEAR), "holds in part"),
        ((MORE, MORE), (MORE, MORE), "does not hold"),
        ((MORE, MORE), (MORE, UNCLEAR), "cannot be told"),
    ],
)
def test_verdict(sigmoid, none, expected):
    assert verdict(result(sigmoid, none)).verdict == expected
