"""The verdict follows from the rank correlations of every change."""

import pytest

from manyheads.studies.rankings_on_other_data import verdict
from manyheads.studies.result import Result

NOISE = (0.0, 0.02, -0.02)


def result(noise=NOISE, **correlations):
    rows = [
        {"model": model, "seed": seed, "change": change, "spearman": value + error}
        for model, by_change in correlations.items()
        for seed, error in enumerate(noise)
        for change, value in by_change.items()
    ]
    return Result("rankings_on_other_data", "quick", {}, rows, complete=True)


HIGH = {"text": 0.95, "domain": 0.8, "language": 0.85}


@pytest.mark.parametrize(
    ("model", "noise", "expected"),
    [
        (HIGH | {"seed": 0.7}, NOISE, "holds"),
        (HIGH | {"seed": 0.1}, NOISE, "holds in part"),
        (dict.fromkeys(HIGH, 0.2) | {"seed": 0.1}, NOISE, "does not hold"),
        (dict.fromkeys(HIGH, 0.2) | {"seed": 0.5}, NOISE, "cannot be told"),
        (HIGH, (0.0,), "cannot be told"),
    ],
)
def test_verdict(model, noise, expected):
    assert verdict(result(noise, language=model)).verdict == expected


def test_every_model_counts():
    low = dict.fromkeys(HIGH, 0.2)
    assert verdict(result(MiniLM=HIGH, language=HIGH)).verdict == "holds"
    assert verdict(result(MiniLM=HIGH, language=low)).verdict == "holds in part"
    assert "other domain 0.20" in verdict(result(MiniLM=HIGH, language=low)).because.en
