"""The same numbers first, then the time."""

import pytest
import torch

from manyheads.nn.multihead import MultiHeadAttention
from manyheads.studies.batched_heads import batched, looped, split, verdict
from manyheads.studies.result import Result


def result(looped_seconds, difference=1e-7, gradient=1e-7):
    rows = [
        {
            "heads": heads,
            "seed": seed,
            "output_difference": difference,
            "gradient_difference": gradient,
            "looped_seconds": 1.0 if heads == 1 else seconds,
            "batched_seconds": 1.0,
        }
        for heads in (1, 8)
        for seed, seconds in enumerate(looped_seconds)
    ]
    return Result("batched_heads", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result([2.0, 2.1, 1.9]), "holds"),
        (result([0.8, 0.81, 0.79]), "holds in part"),
        (result([0.5, 1.5, 2.0]), "cannot be told"),
        (result([2.0]), "cannot be told"),
        (result([2.0, 2.1, 1.9], difference=1e-3), "does not hold"),
        (result([2.0, 2.1, 1.9], gradient=float("nan")), "does not hold"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_both_are_the_multi_head_attention_of_the_package():
    torch.manual_seed(0)
    module = MultiHeadAttention(21, heads=3, bias=False).double()
    matrices = [part.weight.detach().T for part in (module.query, module.key, module.value, module.output)]
    x = torch.randn(2, 5, 21, dtype=torch.float64)
    expected = module(x).detach()
    torch.testing.assert_close(batched(x, matrices, 3), expected)
    torch.testing.assert_close(looped(x, split(matrices, 3), 3), expected)
