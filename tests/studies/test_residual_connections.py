"""The verdict on residual connections follows from the gradient of the deepest model and from the loss."""

import pytest

from manyheads.studies.residual_connections import verdict
from manyheads.studies.result import Result

STRONG, WEAK = [1e-6, 2e-6, 1e-6], [1.0, 1.1, 0.9]
WORSE, EQUAL, UNCLEAR = [3.0, 3.1, 3.2], [1.9, 2.0, 2.1], [1.0, 2.0, 4.0]


def result(gradients, losses):
    rows = []
    for seed in range(3):
        for layers in (2, 48):
            row = {"layers": layers, "seed": seed, "difference": 0.5}
            trained = layers == 2
            rows.append(
                row | {"residual": True, "gradient": 1.0, "loss": 2.0 + 0.1 * seed if trained else None}
            )
            rows.append(
                row
                | {"residual": False, "gradient": gradients[seed], "loss": losses[seed] if trained else None}
            )
    return Result("residual_connections", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("gradients", "losses", "expected"),
    [
        (STRONG, WORSE, "holds"),
        (STRONG, EQUAL, "holds in part"),
        (WEAK, WORSE, "holds in part"),
        (WEAK, EQUAL, "does not hold"),
        (WEAK, UNCLEAR, "cannot be told"),
        ([0.0, 0.0, 0.0], WORSE, "holds"),
    ],
)
def test_verdict(gradients, losses, expected):
    assert verdict(result(gradients, losses)).verdict == expected


def test_each_effect_is_judged_at_the_deepest_model_that_has_it():
    words = verdict(result(STRONG, WORSE)).because.en
    assert "With 48 layers the first layer's gradient" in words
    assert "with 2 layers the loss after training is higher by 1.00" in words
