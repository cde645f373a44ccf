"""The verdict follows from the rank correlations with leave-one-out; the best method from the damage."""

import pytest

from manyheads.studies.importance_methods import EXACT, METHODS, verdict
from manyheads.studies.result import Result

NOISE = (0.0, 0.02, -0.02)
DAMAGE = {"confidence": 0.5, "relevance": 0.4, "gradient": 0.3, "fisher": 0.2, EXACT: 0.25}


def result(correlations, noise=NOISE, damage=DAMAGE):
    rows = []
    for seed, error in enumerate(noise):
        for method, correlation in zip(METHODS, correlations, strict=False):
            key = {"model": "MiniLM", "seed": seed, "first": method}
            rows.append(key | {"second": EXACT, "spearman": correlation + error, "damage": None})
        for method in METHODS:
            key = {"model": "MiniLM", "seed": seed, "first": method, "second": method}
            rows.append(key | {"spearman": 1.0, "damage": damage[method] + error})
    return Result("importance_methods", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("correlations", "noise", "expected"),
    [
        ((0.8, 0.7, 0.9, 0.95), NOISE, "holds"),
        ((0.1, 0.2, 0.3, 0.9), NOISE, "holds in part"),
        ((0.1, 0.2, 0.3, 0.2), NOISE, "does not hold"),
        ((0.1, 0.5, 0.3, 0.2), NOISE, "cannot be told"),
        ((0.8, 0.7, 0.9, 0.95), (0.0,), "cannot be told"),
    ],
)
def test_verdict(correlations, noise, expected):
    assert verdict(result(correlations, noise)).verdict == expected


def test_the_method_to_use_is_the_one_that_does_the_least_damage():
    correlations = (0.8, 0.7, 0.9, 0.95)
    assert "in the order of fisher (0.20" in verdict(result(correlations)).because.en
    better = DAMAGE | {"gradient": 0.1}
    assert "in the order of gradient (0.10" in verdict(result(correlations, damage=better)).because.en
