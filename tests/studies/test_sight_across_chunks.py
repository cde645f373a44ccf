"""The verdict on chunks follows from the accuracy beyond their end, and from what is given back there."""

import pytest
import torch

from manyheads.studies.result import Result
from manyheads.studies.sight_across_chunks import SIZES, _rows, verdict

STARTS = (1, 4, 8, 16)
NOISE = (-0.02, 0.0, 0.02)


def result(full=1.0, chunk=0.1, window=0.9, global_=0.95, noise=NOISE):
    """Accuracy beyond the end of a chunk of 8 in rows of 32, with 10 values to guess from."""
    rows = []
    for seed, wobble in enumerate(noise):
        for pattern, beyond in (("full", full), ("chunk", chunk), ("window", window), ("global", global_)):
            for start in STARTS:
                accuracy = beyond + wobble * (pattern != "full") if start >= 8 else 1.0
                size = 32 if pattern == "full" else 8
                key = {"pattern": pattern, "size": size, "seed": seed, "from_distance": start}
                rows.append(key | {"accuracy": accuracy})
    return Result("sight_across_chunks", "quick", {"values": 10}, rows, complete=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (result(), "holds"),
        (result(window=0.2), "holds in part"),
        (result(chunk=0.8, window=0.8, global_=0.8), "does not hold"),
        (result(full=0.5), "cannot be told"),
        (result(chunk=0.2, window=0.6, global_=0.6, noise=(-0.3, 0.0, 0.4)), "cannot be told"),
    ],
)
def test_verdict(rows, expected):
    assert verdict(rows).verdict == expected


def test_a_row_has_one_marked_token_at_its_distance():
    setup = SIZES["tiny"]
    ids, values = _rows(setup, torch.tensor([1, 5, 15]), torch.Generator().manual_seed(0))
    marked = (ids >= setup.values) & (ids < 2 * setup.values)
    assert marked.sum(1).tolist() == [1, 1, 1]
    assert (setup.length - 1 - marked.int().argmax(1)).tolist() == [1, 5, 15]
    assert torch.equal(ids[marked] - setup.values, values)
    assert (ids[:, -1] == 2 * setup.values).all()
