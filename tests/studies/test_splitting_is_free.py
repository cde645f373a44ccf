"""The verdict asks for equal counts and for an output of equal size."""

import pytest

from manyheads.studies.result import Result
from manyheads.studies.splitting_is_free import verdict


@pytest.mark.parametrize(
    ("parameters", "deviation", "expected"),
    [(100, 0.5, "holds"), (100, 0.6, "holds in part"), (101, 0.5, "does not hold")],
)
def test_verdict(parameters, deviation, expected):
    rows = [
        {"heads": 1, "seed": 0, "parameters": 100, "multiply_adds": 7, "output_deviation": 0.5},
        {"heads": 2, "seed": 0, "parameters": parameters, "multiply_adds": 7, "output_deviation": deviation},
    ]
    assert verdict(Result("splitting_is_free", "quick", {}, rows, complete=True)).verdict == expected
