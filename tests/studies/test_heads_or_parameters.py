"""The verdict follows from the losses of the three small models; they are equally large."""

import pytest

from manyheads.studies.heads_or_parameters import SIZES, parts, verdict
from manyheads.studies.result import Result

NOISE = (0.0, 0.01, -0.01)


def result(noise=NOISE, **losses):
    rows = [
        {"seed": seed, "model": model, "loss": loss + seed + error * (model == "pruned"), "parameters": 1}
        for model, loss in losses.items()
        for seed, error in enumerate(noise)
    ]
    return Result("heads_or_parameters", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("pruned", "scratch", "narrow", "expected"),
    [
        (2.1, 2.2, 2.0, "holds"),
        (2.1, 2.0, 2.0, "holds in part"),
        (2.0, 2.2, 2.1, "holds in part"),
        (2.1, 2.0, 2.2, "does not hold"),
        (2.1, 2.1, 2.2, "cannot be told"),
    ],
)
def test_verdict(pruned, scratch, narrow, expected):
    losses = {"full": 1.9, "pruned": pruned, "scratch": scratch, "narrow": narrow}
    assert verdict(result(**losses)).verdict == expected


def test_one_seed_tells_nothing():
    assert verdict(result((0.0,), full=1.9, pruned=2.1, scratch=2.2, narrow=2.0)).verdict == "cannot be told"


def test_the_small_models_are_equally_large():
    setup = SIZES["tiny"]
    sizes = {row["model"]: row["parameters"] for row in parts(setup)[0].measure()}
    assert sizes["pruned"] == sizes["scratch"] < sizes["full"]
    assert sizes["narrow"] == pytest.approx(sizes["pruned"], rel=0.01)
