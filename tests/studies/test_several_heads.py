"""The verdict follows from the rows: the same rule, other numbers, another verdict."""

import pytest

from manyheads.studies.result import Result
from manyheads.studies.several_heads import verdict


def result(losses_by_heads):
    rows = [
        {"heads": heads, "seed": seed, "loss": loss, "parameters": 1}
        for heads, losses in losses_by_heads.items()
        for seed, loss in enumerate(losses)
    ]
    return Result("several_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1: [2.0, 2.1, 2.2], 2: [1.8, 1.9, 2.0], 4: [1.9, 2.0, 2.1]}, "holds"),
        ({1: [2.0, 2.1, 2.2], 2: [1.9, 2.0, 2.1], 4: [1.8, 1.9, 2.0]}, "holds in part"),
        ({1: [2.0, 2.1, 2.2], 2: [2.2, 2.3, 2.4], 4: [2.1, 2.2, 2.3]}, "does not hold"),
        ({1: [2.0, 2.1, 2.2], 2: [1.5, 2.5, 2.2], 4: [2.1, 2.2, 2.3]}, "cannot be told"),
        ({1: [2.0], 2: [1.0]}, "cannot be told"),
    ],
)
def test_verdict(losses, expected):
    assert verdict(result(losses)).verdict == expected


def test_the_best_number_is_named():
    assert "4 heads are the best" in verdict(result({1: [2.0, 2.1], 2: [2.0, 2.0], 4: [1.0, 1.1]})).because.en
