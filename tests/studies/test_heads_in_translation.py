"""The verdict follows from the rows: the same rule, other numbers, another verdict."""

import pytest

from manyheads.studies.heads_in_translation import verdict
from manyheads.studies.result import Result


def result(scores_by_heads):
    rows = [
        {"heads": heads, "seed": seed, "bleu": bleu, "loss": 1.0, "parameters": 1}
        for heads, scores in scores_by_heads.items()
        for seed, bleu in enumerate(scores)
    ]
    return Result("heads_in_translation", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("eight", "expected"),
    [
        ([33.0, 33.1, 33.2], "holds"),
        ([30.9, 31.1, 31.0], "holds in part"),
        ([29.0, 29.1, 29.2], "does not hold"),
        ([28.0, 31.5, 30.9], "cannot be told"),
    ],
)
def test_verdict(eight, expected):
    assert verdict(result({1: [30.0, 30.1, 30.2], 8: eight})).verdict == expected


def test_the_best_number_is_named():
    judged = verdict(result({1: [30.0, 30.1], 4: [40.0, 40.1], 8: [33.0, 33.1]}))
    assert "the best number is 4, with 40.0 BLEU" in judged.because.en
