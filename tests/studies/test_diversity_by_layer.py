"""The verdict follows from the distances: falling, rising, falling in one model only, and noise."""

import pytest

from manyheads.studies.diversity_by_layer import verdict
from manyheads.studies.result import Result

FALLING = [[0.6, 0.5, 0.4, 0.3], [0.62, 0.5, 0.4, 0.31], [0.61, 0.5, 0.41, 0.3]]
RISING = [row[::-1] for row in FALLING]
NOISE = [[0.6, 0.5, 0.4, 0.3], [0.3, 0.4, 0.5, 0.6], [0.5, 0.5, 0.48, 0.5]]


def result(**distances):
    rows = [
        {"model": model, "seed": seed, "layer": layer, "distance": distance}
        for model, by_seed in distances.items()
        for seed, by_layer in enumerate(by_seed)
        for layer, distance in enumerate(by_layer, 1)
    ]
    return Result("diversity_by_layer", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        ({"MiniLM": FALLING, "language": FALLING}, "holds"),
        ({"MiniLM": FALLING, "language": RISING}, "holds in part"),
        ({"MiniLM": RISING, "language": RISING}, "does not hold"),
        ({"MiniLM": NOISE, "language": RISING}, "cannot be told"),
        ({"MiniLM": FALLING[:1]}, "cannot be told"),
    ],
)
def test_verdict(distances, expected):
    assert verdict(result(**distances)).verdict == expected


def test_the_fall_is_that_from_the_lower_to_the_upper_half():
    assert "MiniLM (real) 0.200" in verdict(result(MiniLM=FALLING[:1])).because.en
