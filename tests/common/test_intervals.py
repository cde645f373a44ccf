"""Intervals are those of scipy; pairs are matched by seed."""

import math

import pytest
from scipy import stats

from manyheads.common.intervals import interval, paired_difference, student


def test_an_interval_is_that_of_scipy():
    values = [3.0, 5.0, 4.5]
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    spread = interval(values)
    assert (spread.mean, spread.low, spread.high, spread.count) == pytest.approx((12.5 / 3, low, high, 3))
    wider = stats.ttest_1samp(values, 0.0).confidence_interval(0.99)
    assert interval(values, 0.99).low == pytest.approx(wider.low)


def test_one_value_has_no_interval():
    spread = interval([2.0])
    assert (spread.mean, math.isnan(spread.low), math.isnan(spread.high)) == (2.0, True, True)
    assert f"{spread:.1f}" == "2.0"
    assert interval([]).count == 0


def test_pairs_are_matched_by_seed():
    first, second = {0: 1.0, 1: 12.0, 2: 3.0}, {2: 2.0, 1: 11.0, 5: 0.0, 0: 0.0}
    spread = paired_difference(first, second)
    assert (spread.mean, spread.half, spread.count) == (1.0, pytest.approx(0.0), 3)


def test_students_interval():
    exact = {1: 12.706, 2: 4.303, 6: 2.447, 10: 2.228, 30: 2.042}
    for degrees, wanted in exact.items():
        assert student(degrees) == pytest.approx(wanted, rel=0.01)
    assert math.isnan(student(0))
