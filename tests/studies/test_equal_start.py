"""Equal heads are compared with random ones, and with noisy ones."""

import pytest

from manyheads.studies.equal_start import verdict
from manyheads.studies.result import Result

RANDOM = [0.40, 0.42, 0.41]


def result(equal, noisy, random=RANDOM):
    starts = {"equal": equal, "equal + 1e-06": [0.0] * 3, "equal + 0.001": noisy, "random": random}
    rows = [
        {"start": start, "seed": seed, "step": step, "spread": 0.1, "loss": 2.0, "distance": step * distance}
        for start, distances in starts.items()
        for seed, distance in enumerate(distances)
        for step in (0, 1)
    ]
    return Result("equal_start", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("equal", "noisy", "expected"),
    [
        ([0.0, 0.0, 0.0], [0.30, 0.31, 0.29], "holds"),
        ([0.001, 0.001, 0.001], [0.001, 0.001, 0.001], "holds in part"),
        ([0.10, 0.11, 0.12], [0.30, 0.31, 0.29], "does not hold"),
        ([0.0, 0.0, 0.3], [0.30, 0.31, 0.29], "cannot be told"),
        ([0.0], [0.30], "cannot be told"),
    ],
)
def test_verdict(equal, noisy, expected):
    assert verdict(result(equal, noisy)).verdict == expected
