"""The ratio of the two heads' gradients decides, and that it turns round with the task."""

import pytest
import torch

from manyheads.studies.far_context import Setup, TwoHeads, sequences, verdict
from manyheads.studies.head_weights import by_head
from manyheads.studies.result import Result


def result(far_task, near_task):
    """The far head's gradients in both tasks; those of the near head are one."""
    rows = [
        {"needs": needs, "seed": seed, "step": step, "far_gradient": far, "near_gradient": 1.0, "accuracy": 1}
        for needs, gradients in (("far", far_task), ("near", near_task))
        for seed, far in enumerate(gradients)
        for step in (10, 20)
    ]
    return Result("far_context", "quick", {}, rows, complete=True)


@pytest.mark.parametrize(
    ("far_task", "near_task", "expected"),
    [
        ([3.0, 3.1, 3.2], [0.3, 0.31, 0.32], "holds"),
        ([3.0, 3.1, 3.2], [1.5, 1.6, 1.7], "holds in part"),
        ([0.9, 0.8, 0.85], [0.3, 0.31, 0.32], "holds in part"),
        ([0.3, 0.31, 0.32], [3.0, 3.1, 3.2], "does not hold"),
        ([0.3, 1.0, 3.0], [3.0, 1.0, 0.3], "cannot be told"),
    ],
)
def test_verdict(far_task, near_task, expected):
    assert verdict(result(far_task, near_task)).verdict == expected


def test_only_the_head_that_sees_a_token_depends_on_it():
    model = TwoHeads(span=3, values=5, d_model=8)
    columns = by_head(model.attention)[-1]  # (heads, d_model, d_value) of the output
    columns[1] = 0.0  # without the far head, the first half is out of sight
    ids = torch.tensor([[0, 1, 2, 3, 4, 0]])
    far, near = ids.clone(), ids.clone()
    far[0, 0], near[0, 5] = 7, 7
    with torch.no_grad():
        assert torch.equal(model(far), model(ids))
        assert not torch.equal(model(near), model(ids))


@pytest.mark.parametrize(("needs", "half"), [("far", slice(0, 4)), ("near", slice(4, 8))])
def test_one_token_is_marked_where_the_task_says(needs, half):
    setup = Setup(span=4, values=5, batch=7)
    ids, answers = sequences(setup, needs, torch.Generator().manual_seed(0))
    assert torch.equal((ids >= 5).sum(1), torch.ones(7))
    assert torch.equal(ids[:, half].amax(1) - 5, answers)
