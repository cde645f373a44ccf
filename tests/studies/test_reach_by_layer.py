"""The verdict follows from reach and syntax by layer; without a treebank it holds in part at best."""

import pytest

from manyheads.studies.reach_by_layer import _sample_of_treebank, verdict
from manyheads.studies.result import Result

RISING, FALLING, FLAT = [0.7, 0.8, 1.0, 1.1], [0.3, 0.28, 0.1, 0.05], [0.5, 0.5, 0.5, 0.5]
NOISE = (0.0, 0.01, -0.01)


def result(reach, syntax=None, noise=NOISE):
    rows = [
        {
            "model": "MiniLM", "seed": seed, "layer": layer, "reach": value + error * (layer > 2),
            "syntax": None if syntax is None else syntax[layer - 1],
        }
        for seed, error in enumerate(noise)
        for layer, value in enumerate(reach, 1)
    ]  # fmt: skip
    return Result("reach_by_layer", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("reach", "syntax", "noise", "expected"),
    [
        (RISING, FALLING, NOISE, "holds"),
        (RISING, None, NOISE, "holds in part"),
        (RISING, FLAT, NOISE, "holds in part"),
        (FLAT, FALLING, NOISE, "holds in part"),
        (FLAT, FLAT, NOISE, "does not hold"),
        (FLAT, None, NOISE, "does not hold"),
        (RISING, None, (0.0,), "cannot be told"),
        (RISING, FLAT, (0.0, 2.0, -2.0), "cannot be told"),
    ],
)
def test_verdict(reach, syntax, noise, expected):
    assert verdict(result(reach, syntax, noise)).verdict == expected


def test_samples_of_a_treebank_share_no_sentence(tmp_path):
    path = tmp_path / "bank.conllu"
    path.write_text("a\n\nb\n\nc\n\n")
    assert [_sample_of_treebank(str(path), seed, 2) for seed in (0, 1)] == ["a\n\nc\n\n", "b\n\n"]
