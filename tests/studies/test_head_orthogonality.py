"""The verdict on orthogonality follows from the changes while training."""

import pytest

from manyheads.studies.head_orthogonality import READ, verdict
from manyheads.studies.result import Result


def result(read, cka, noise=0.001):
    """Orthogonality rises by ``read``, CKA changes by ``cka``."""
    rows = []
    for seed in range(3):
        for step in (0, 10, 20):
            wobble = noise * (seed - 1)
            row = dict.fromkeys(READ, 0.75 + (read + wobble) * step / 20)
            rows.append({"seed": seed, "step": step} | row | {"cka": 0.5 + (cka + wobble) * step / 20})
    return Result("head_orthogonality", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result(read=0.05, cka=-0.2), "holds"),
        (result(read=-0.05, cka=-0.2), "holds in part"),
        (result(read=-0.05, cka=0.2), "does not hold"),
        (result(read=0.01, cka=0.01, noise=1.0), "cannot be told"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_the_change_is_from_the_first_step_to_the_last():
    assert "Change from step 0 to step 20" in verdict(result(0.05, -0.2)).because.en
    assert "queries +0.050" in verdict(result(0.05, -0.2)).because.en
