"""The verdict follows from the counts: all kinds, some, one, and counts that come and go."""

import pytest

from manyheads.studies.kinds_of_heads import KINDS, verdict
from manyheads.studies.result import Result

ALL = {"local": [9, 10, 9], "global": [5, 5, 5], "sink": [20, 21, 22], "no-op": [3, 3, 3]}
SOME = ALL | {"no-op": [0, 0, 0]}
ONE = {"local": [9, 10, 9], "global": [0, 0, 0], "sink": [0, 1, 0], "no-op": [0, 0, 0]}
UNSTEADY = ONE | {"sink": [0, 5, 0]}


def result(**counts):
    rows = [
        {"model": model, "seed": seed, "kind": kind, "count": count, "share": count / 72}
        for model, by_kind in counts.items()
        for kind in KINDS
        for seed, count in enumerate(by_kind[kind])
    ]
    return Result("kinds_of_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"MiniLM": ALL, "language": ONE}, "holds"),
        ({"MiniLM": SOME, "language": ALL}, "holds in part"),
        ({"MiniLM": ONE, "language": ALL}, "does not hold"),
        ({"MiniLM": UNSTEADY, "language": ALL}, "cannot be told"),
        ({"language": SOME}, "holds in part"),
    ],
)
def test_verdict(counts, expected):
    assert verdict(result(**counts)).verdict == expected


def test_the_numbers_are_said():
    assert "idle 3.0" in verdict(result(MiniLM=ALL)).because.en
