"""What sums to one decides: all heads together, each row, or nothing."""

import pytest

from manyheads.studies.result import Result
from manyheads.studies.weight_sums import verdict


def result(one_head, all_heads):
    sums = {"keys": one_head, "keys and heads": all_heads, "queries": (0.1, 1.0, 3.0)}
    rows = [
        {"seed": 0, "over": name, "least": least, "mean": mean, "largest": largest}
        for name, (least, mean, largest) in sums.items()
    ]
    return Result("weight_sums", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("one_head", "all_heads", "expected"),
    [
        ((0.2, 0.3, 0.4), (0.9999, 1.0, 1.0), "holds"),
        ((1.0, 1.0, 1.0), (12.0, 12.0, 12.0), "holds in part"),
        ((0.99, 1.0, 1.0), (12.0, 12.0, 12.0), "does not hold"),
        ((1.0, 1.0, 1.01), (1.0, 1.0, 1.1), "does not hold"),
    ],
)
def test_verdict(one_head, all_heads, expected):
    assert verdict(result(one_head, all_heads)).verdict == expected


def test_the_sum_of_all_heads_is_quoted():
    assert "together sum to 12.00" in verdict(result((1.0, 1.0, 1.0), (12.0, 12.0, 12.0))).because.en
