"""Four conditions decide: who adds, who cancels, and two ways to do without."""

import pytest
import torch

from manyheads.studies.output_mixing import SIZES, Average, OwnChannels, parts, verdict
from manyheads.studies.result import Result

NOT_MANY = [0.0, 0.01, 0.02]


def result(adding, cancelling, channels, average):
    losses = {"mixing": [2.0, 2.01, 2.02], "own channels": channels, "average": average}
    rows = [
        {"output": kind, "seed": seed, "adding": adding[seed], "cancelling": cancelling[seed], "loss": loss}
        for kind, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return Result("output_mixing", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result([0.5, 0.5, 0.6], [0.3, 0.3, 0.2], [2.1, 2.11, 2.12], [2.2, 2.21, 2.22]), "holds"),
        (result([0.5, 0.5, 0.6], NOT_MANY, [2.1, 2.11, 2.12], [1.9, 1.91, 1.92]), "holds in part"),
        (result(NOT_MANY, NOT_MANY, [1.9, 1.91, 1.92], [1.9, 1.91, 1.92]), "does not hold"),
        (result([0.0, 0.3, 0.1], NOT_MANY, [1.9, 1.91, 1.92], [1.9, 1.91, 1.92]), "cannot be told"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_a_head_writes_to_its_channels_only():
    projection = OwnChannels(heads=3, d_model=12)
    x = torch.zeros(1, 1, 12)
    x[..., 4:8] = torch.randn(4)
    written = projection(x)[0, 0]
    assert written[4:8].all()
    assert not torch.cat([written[:4], written[8:]]).any()


def test_the_average_does_not_tell_heads_apart():
    x = torch.randn(2, 5, 12)
    swapped = x.unflatten(2, (3, 4)).flip(2).flatten(2)
    projection = Average(heads=3, d_model=12)
    torch.testing.assert_close(projection(x), projection(swapped))


def test_all_outputs_have_the_same_number_of_parameters():
    rows = [part.measure() for part in parts(SIZES["tiny"])[:3]]
    counts = [row["parameters"] for row in rows]
    assert max(counts) - min(counts) <= 16 * 2
