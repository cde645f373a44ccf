"""The verdict on norms follows from the gradient, the loss without warm-up, and what warm-up gives."""

import pytest

from manyheads.studies.norm_position import verdict
from manyheads.studies.result import Result


def result(post_ratio, cold, warm, noise=0.01):
    """Losses of post-norm without and with warm-up; pre-norm has 2.0, and a ratio of gradients of 1."""
    rows = []
    for seed in range(3):
        for norm in ("pre", "post"):
            ratio = 1.0 if norm == "pre" else post_ratio
            key = {"norm": norm, "layers": 12, "seed": seed}
            rows.append(key | {"rate": None, "warmup": None, "gradient_ratio": ratio})
            for warmup, loss in ((False, cold), (True, warm)):
                for rate in (1e-3, 5e-3):
                    at_rate = loss if norm == "post" and rate == 5e-3 else 2.0
                    wobble = noise * (seed - 1) * (norm == "post")
                    row = {"rate": rate, "warmup": warmup, "loss": at_rate + wobble * (1 - 0.5 * warmup)}
                    rows.append(key | row)
    return Result("norm_position", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result(0.01, cold=3.0, warm=2.1), "holds"),
        (result(1.0, cold=3.0, warm=2.1), "holds in part"),
        (result(0.01, cold=3.0, warm=3.0, noise=5.0), "holds in part"),
        (result(1.0, cold=1.9, warm=2.1), "does not hold"),
        (result(1.0, cold=2.0, warm=2.1, noise=5.0), "cannot be told"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_the_words_name_depth_and_rate():
    assert "With 12 layers, learning rate 0.005 and no warm-up" in verdict(result(0.01, 3.0, 2.1)).because.en
