"""The verdict on heads that look at pictures follows from their shares and from what is lost without them."""

import pytest

from manyheads.studies.picture_heads import verdict
from manyheads.studies.result import Result


def result(low, blank, most, least, noise=0.01):
    """The highest share is 0.9; the loss is 1.0 with everything."""
    rows = []
    for seed in range(3):
        key = {"seed": seed, "condition": None, "layer": None, "rank": None, "share": None, "loss": None}
        wobble = noise * (seed - 1)
        for rank, share in ((1, 0.9), (2, low + wobble)):
            rows.append(key | {"layer": 0, "rank": rank, "share": share})
        losses = {"whole": 1.0, "blank": blank + wobble, "most": most + 2 * wobble, "least": least}
        rows += [key | {"condition": name, "loss": loss} for name, loss in losses.items()]
    return Result("picture_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result(low=0.2, blank=2.0, most=1.8, least=1.1), "holds"),
        (result(low=0.8, blank=2.0, most=1.8, least=1.1), "holds in part"),
        (result(low=0.2, blank=2.0, most=1.1, least=1.8), "holds in part"),
        (result(low=0.8, blank=0.9, most=1.1, least=1.8), "does not hold"),
        (result(low=0.6, blank=1.1, most=1.2, least=1.1, noise=1.0), "cannot be told"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_the_shares_of_the_extreme_heads_are_named():
    words = verdict(result(low=0.2, blank=2.0, most=1.8, least=1.1)).because.en
    assert "most gives it 90% of its attention, the one that looks least 20%" in words
