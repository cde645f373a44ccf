"""Differing more and being better are judged apart, for the term and for the constraint."""

import pytest

from manyheads.studies.forced_orthogonality import verdict
from manyheads.studies.result import Result

NOISE = (0.0, 0.001, -0.001)


def result(apart, worse):
    more = {"none": (0.0, 0.0), "term": (apart, worse), "constraint": (apart, worse)}
    rows = [
        {"way": way, "seed": seed, "js": 0.3 + js + noise, "loss": 2.0 + 0.1 * seed + loss + noise}
        for way, (js, loss) in more.items()
        for seed, noise in enumerate(NOISE if way != "none" else (0.0, 0.0, 0.0))
    ]
    return Result("forced_orthogonality", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("apart", "worse", "expected"),
    [
        (0.1, -0.1, "holds"),
        (0.1, 0.1, "holds in part"),
        (-0.1, 0.1, "does not hold"),
        (0.0, 0.0, "cannot be told"),
    ],
)
def test_verdict(apart, worse, expected):
    assert verdict(result(apart, worse)).verdict == expected
