"""The verdict follows from the damage at half and at three quarters, and from the random control."""

import pytest
import torch

from manyheads.heads.importance import importance
from manyheads.studies.few_heads_matter import SHARES, verdict
from manyheads.studies.result import Result
from manyheads.studies.silencing import candidates, damages, reverse
from manyheads.studies.subjects import Subjects, subject

NOISE = (0.0, 0.005, -0.005)


def result(random=0.8, noise=NOISE, **damages):
    """The damage by rank at a half and at three quarters, by model."""
    rows = [
        {"model": model, "seed": seed, "order": order, "removed": share, "damage": value + error}
        for model, (half, most) in damages.items()
        for seed, error in enumerate(noise)
        for share in SHARES
        for order, value in (("rank", half if share < 0.7 else most), ("random", random), ("reverse", 0.9))
    ]
    return Result("few_heads_matter", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("damages", "expected"),
    [
        ({"MiniLM": (0.02, 0.06), "language": (0.01, 0.05)}, "holds"),
        ({"MiniLM": (0.02, 0.06), "language": (0.3, 0.5)}, "holds in part"),
        ({"MiniLM": (0.02, 0.4)}, "holds in part"),
        ({"MiniLM": (0.3, 0.4), "language": (0.3, 0.5)}, "does not hold"),
        ({"MiniLM": (0.1, 0.4)}, "cannot be told"),
    ],
)
def test_verdict(damages, expected):
    assert verdict(result(**damages)).verdict == expected


def test_a_ranking_that_is_no_better_than_random_does_not_count():
    assert verdict(result(MiniLM=(0.02, 0.06), random=0.01)).verdict == "does not hold"


def test_damages_are_those_of_the_heads_that_a_ranking_puts_last():
    setup = Subjects(d_model=16, heads=2, layers=2, context=16, steps=20, batch_tokens=128, windows=4)
    looked = subject(setup, "language", 0)
    table = candidates(importance(looked.model, looked.batches, "leave-one-out"))
    (quarter,) = damages(looked, table, [0.25])
    (other,) = damages(looked, reverse(table), [0.25])
    first = min(range(len(table)), key=lambda i: table["importance"][i])
    row = table.rows[first]
    site = dict(looked.model.named_modules())[row.site]
    full, weight = looked.loss(), site.output.weight
    width = weight.shape[1] // 2
    with torch.no_grad():
        weight[:, row.head * width : (row.head + 1) * width] = 0.0
    without = looked.loss()
    assert quarter != pytest.approx(other)
    assert (without - full) / quarter > 0
    with torch.no_grad():
        for module in looked.model.modules():
            if type(module) is type(site):
                module.output.weight.zero_()
    assert quarter == pytest.approx((without - full) / (looked.loss() - full), rel=1e-3, abs=1e-5)
