"""The verdict follows from the shares of heads with a role, among important heads and among others."""

import pytest

from manyheads.studies.result import Result
from manyheads.studies.roles_of_important_heads import verdict

NOISE = (0.0, 0.02, -0.02)


def result(noise=NOISE, **shares):
    """The shares of important and of other heads with a role, by model."""
    rows = [
        {
            "model": model, "seed": seed, "group": group, "syntactic": None,
            "positional": share, "rare": 0.0, "any_role": share + error * (group == "important"),
        }
        for model, pair in shares.items()
        for seed, error in enumerate(noise)
        for group, share in zip(("important", "other"), pair, strict=True)
    ]  # fmt: skip
    return Result("roles_of_important_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"MiniLM": (0.8, 0.2), "language": (0.7, 0.1)}, "holds"),
        ({"MiniLM": (0.4, 0.2)}, "holds in part"),
        ({"MiniLM": (0.8, 0.2), "language": (0.1, 0.2)}, "holds in part"),
        ({"MiniLM": (0.1, 0.3), "language": (0.1, 0.2)}, "does not hold"),
        ({"MiniLM": (0.2, 0.19)}, "cannot be told"),
    ],
)
def test_verdict(shares, expected):
    assert verdict(result(**shares)).verdict == expected


def test_one_repetition_tells_nothing():
    assert verdict(result((0.0,), MiniLM=(0.8, 0.2))).verdict == "cannot be told"


def test_roles_that_were_not_looked_for_are_not_hidden():
    without = result(MiniLM=(0.8, 0.2))
    assert "Roles looked for: 2 of 3" in verdict(without).because.en
    without.rows[0]["syntactic"] = 0.1
    assert "Roles looked for: 3 of 3" in verdict(without).because.en
