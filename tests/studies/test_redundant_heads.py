"""Cutting must cost nothing and starting anew must help; each by its interval over seeds."""

import pytest

from manyheads.studies.language_models import TINY
from manyheads.studies.redundant_heads import Setup, parts, verdict
from manyheads.studies.result import Result

NOISE = (0.0, 0.001, -0.001)


def result(cut, anew):
    more = {"alone": 0.0, "cut": cut, "anew": anew, "random": 0.0}
    rows = [
        {
            "way": way,
            "seed": seed,
            "loss": 2.0 + 0.1 * seed + more[way] + noise * (way != "alone"),
            "heads_left": 8,
        }
        for way in more
        for seed, noise in enumerate(NOISE)
    ]
    return Result("redundant_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("cut", "anew", "expected"),
    [
        (0.0, -0.05, "holds"),
        (0.0, 0.05, "holds in part"),
        (0.1, -0.05, "holds in part"),
        (0.1, 0.05, "does not hold"),
        (0.02, 0.0, "cannot be told"),
    ],
)
def test_verdict(cut, anew, expected):
    assert verdict(result(cut, anew)).verdict == expected


def test_only_cutting_leaves_fewer_heads():
    rows = {
        part.key["way"]: part.measure()
        for part in parts(Setup(**(TINY | {"heads": 4, "steps": 6, "seeds": 1})))
    }
    assert {way: row["heads_left"] for way, row in rows.items()} == {
        "alone": 4,
        "cut": 3,
        "anew": 4,
        "random": 4,
    }
    assert rows["anew"]["loss"] != rows["alone"]["loss"]
