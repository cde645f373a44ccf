"""The verdict follows from how many heads stand apart, in how many layers, and how near the others are."""

import pytest
import torch

from manyheads.studies.outlier_heads import standing_apart, verdict
from manyheads.studies.result import Result


def result(outliers_by_seed, inner=0.3, between=0.5):
    """Some repetitions, each with the number of outliers of every layer."""
    rows = [
        {
            "model": "MiniLM", "seed": seed, "layer": layer, "outliers": count, "farthest": 0.6,
            "median": 0.4, "limit": 0.5, "inner": inner, "between_layers": between,
        }
        for seed, counts in enumerate(outliers_by_seed)
        for layer, count in enumerate(counts, 1)
    ]  # fmt: skip
    return Result("outlier_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("outliers", "expected"),
    [
        ([[1, 2, 1, 1], [1, 1, 2, 1], [2, 1, 1, 1]], "holds"),
        ([[1, 2, 1, 0], [1, 1, 2, 0], [2, 1, 1, 0]], "holds in part"),
        ([[0, 3, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1]], "does not hold"),
        ([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], "cannot be told"),
    ],
)
def test_verdict(outliers, expected):
    assert verdict(result(outliers)).verdict == expected


def test_heads_that_are_as_far_apart_as_layers_are_not_alike():
    assert verdict(result([[1, 2], [1, 1], [2, 1]], inner=0.6)).verdict == "does not hold"


def test_an_outlier_is_far_from_a_crowd():
    torch.manual_seed(0)
    points = torch.randn(7, 3, dtype=torch.float64) * 0.1
    distances = torch.cdist(points, points)
    assert standing_apart(distances)["outliers"] == 0
    points[3] += 2.0
    far = torch.cdist(points, points)
    row = standing_apart(far)
    assert row["outliers"] == 1
    assert row["farthest"] == pytest.approx(float(far[3].sum() / 6))
    crowd = [0, 1, 2, 4, 5, 6]
    assert row["inner"] == pytest.approx(float(far[crowd][:, crowd].sum() / 30))
