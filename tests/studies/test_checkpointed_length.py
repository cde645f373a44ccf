"""The verdict on checkpointing follows from the lengths; these are right where they can be computed."""

from dataclasses import replace

import pytest

from manyheads.studies.checkpointed_length import SIZES, STATUS, _bytes, _longest, _resident, verdict
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


@pytest.mark.skipif(not STATUS.exists(), reason="this system has no /proc")
def test_resident_memory_grows_by_about_what_is_counted():
    setup = replace(SIZES["tiny"], length=4096, d_model=64)
    counted = _bytes(setup, 2, "fused", False, setup.length)
    assert 0.5 * counted < _resident(setup, 2, "fused", False) < 3 * counted
