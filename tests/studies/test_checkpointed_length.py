"""The verdict on checkpointing follows from the lengths; these are right where they can be computed."""

import pytest

from manyheads.studies.checkpointed_length import SIZES, _bytes, _longest, verdict
from manyheads.studies.result import Result


def result(fused, textbook, both):
    rows = []
    for seed in range(2):
        for layers in (6, 24):
            for kernel, times in (("fused", fused), ("reference", textbook)):
                for checkpoint in (False, True):
                    key = {"layers": layers, "kernel": kernel, "checkpoint": checkpoint, "seed": seed}
                    counted = seed == 0
                    row = {
                        "memory": 1.0 if counted else None,
                        "times_longer": times if counted else None,
                        "times_longer_than_textbook": both if counted else None,
                        "seconds": 1.0 + checkpoint / 3 if layers == 6 else None,
                    }
                    rows.append(key | row)
    return Result("checkpointed_length", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result(80.0, 2.0, 90.0), "holds"),
        (result(8.0, 2.0, 90.0), "holds in part"),
        (result(8.0, 2.0, 60.0), "does not hold"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected
    assert "1.33" in verdict(rows).because.en


def test_the_longest_sequence_takes_the_memory_and_no_more():
    setup = SIZES["tiny"]
    budget = _bytes(setup, 2, "fused", False, 40)
    longest = _longest(setup, 2, "fused", True, budget)
    assert longest > 40
    assert _bytes(setup, 2, "fused", True, round(longest)) == pytest.approx(budget, rel=0.05)
    assert _longest(setup, 2, "reference", False, _bytes(setup, 2, "reference", False, 50)) == pytest.approx(
        50, rel=0.03
    )
