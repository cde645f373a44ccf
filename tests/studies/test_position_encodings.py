"""The verdict on positions follows from the gap to the encodings, and from where it is greater."""

import pytest

from manyheads.studies.position_encodings import ENCODINGS, verdict
from manyheads.studies.result import Result


def result(short, long, noise=0.01):
    """Losses without positions; all encodings have 1.0."""
    rows = []
    for seed in range(3):
        for positions in ENCODINGS:
            for half, loss in (("short", short), ("long", long)):
                wobble = noise * (seed - 1) * (1 + (half == "long"))
                without = {"loss": loss + wobble if positions == "none" else 1.0, "bleu": 10.0}
                rows.append({"positions": positions, "seed": seed, "half": half} | without)
    return Result("position_encodings", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result(short=1.5, long=2.5), "holds"),
        (result(short=1.5, long=1.2), "holds in part"),
        (result(short=0.9, long=0.8), "does not hold"),
        (result(short=1.1, long=1.2, noise=1.0), "cannot be told"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_the_best_encoding_is_named():
    rows = result(short=1.5, long=2.5)
    for row in rows.rows:
        row["loss"] = 0.5 if row["positions"] == "rotary" else row["loss"]
    assert "the best is rotary" in verdict(rows).because.en
