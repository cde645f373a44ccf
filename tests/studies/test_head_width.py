"""The narrowest heads and those just below 64 decide, in language; recall is only shown."""

import pytest

from manyheads.studies.head_width import verdict
from manyheads.studies.result import Result

WIDE = [2.0, 2.01, 2.02]
WORSE, UNCLEAR = [2.5, 2.51, 2.52], [2.4, 1.7, 2.2]


def result(recall, language):
    """The losses of width 1 and width 32, in both tasks."""
    rows = [
        {"task": task, "fixed": fixed, "d_key": d_key, "seed": seed, "loss": loss, "parameters": 1}
        for task, (narrow, below) in (("recall", recall), ("language", language))
        for fixed in ("heads", "d_model")
        for d_key, losses in ((1, narrow), (16, [2.3, 2.3, 2.3]), (32, below), (64, WIDE))
        for seed, loss in enumerate(losses)
    ]
    return Result("head_width", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ((WORSE, WORSE), "holds"),
        ((WORSE, WIDE), "holds in part"),
        ((WIDE, WIDE), "does not hold"),
        ((WORSE, UNCLEAR), "cannot be told"),
        ((UNCLEAR, WIDE), "cannot be told"),
    ],
)
@pytest.mark.parametrize("recall", [(WORSE, WORSE), (WIDE, WIDE)])
def test_verdict_follows_language_and_not_recall(recall, language, expected):
    assert verdict(result(recall, language)).verdict == expected


def test_the_best_width_at_a_fixed_d_model_is_named():
    judgement = verdict(result((WORSE, WORSE), (WORSE, [1.8, 1.8, 1.8])))
    assert "the best width is 32" in judgement.because.en
