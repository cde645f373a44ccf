"""The probe's contents."""

import pytest
import torch
from torch import nn

from manyheads.capture.probe_inputs import LONGER, Inputs, candidate_batches, replaced, structure_copy


def boxes(batch: int, length: int) -> torch.Tensor:
    """Boxes (batch, length, 4): left, top, right, bottom."""
    corner, size = torch.randint(0, 50, (2, batch, length, 2), generator=torch.Generator().manual_seed(0))
    return torch.cat([corner, corner + size + 1], -1)


def are_boxes(x: torch.Tensor) -> bool:
    return bool((x[..., 2:] > x[..., :2]).all())


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [2, 7, 50])
def test_boxes_stay_boxes(batch, length) -> None:
    called = Inputs((), {"input_ids": torch.randint(5, 90, (batch, length)), "bbox": boxes(batch, length)})
    for probe in candidate_batches(called):
        assert are_boxes(probe.kwargs["bbox"])
        for axis in (0, 1):
            other = replaced(probe, axis)
            if other is not None:
                assert are_boxes(other.kwargs["bbox"])
                changed = (other.kwargs["bbox"] != probe.kwargs["bbox"]).any(-1)
                assert int(changed.any(1 - axis).sum()) <= 1


def test_a_replaced_token_has_another_box() -> None:
    probe = Inputs((), {"bbox": boxes(3, 7)})
    other = replaced(probe, 1)
    assert other is not None
    assert (other.kwargs["bbox"] != probe.kwargs["bbox"]).any(-1).any(0).tolist() == [
        i == 2 for i in range(7)
    ]


class Counting(nn.Linear):
    """Says how it is copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> "Counting":
        copied = Counting(3, 3)
        copied.weight, copied.bias = self.weight, self.bias
        copied.was_copied = True
        return copied


def test_a_copy_of_a_model_shares_its_weights_and_nothing_else() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict(
        {"one": nn.Sequential(shared, nn.BatchNorm1d(3)), "two": shared, "own": Counting(3, 3)}
    )
    model.table, model.kept, model.nothing = torch.arange(6.0), [shared, {"a": [1]}], nn.ParameterDict()
    model["one"].register_module("missing", None)
    copied = structure_copy(model)
    assert type(copied) is nn.ModuleDict
    assert copied["one"][0] is copied["two"] is copied.kept[0] is not shared
    assert copied["two"].weight is shared.weight
    assert copied["own"].was_copied
    assert copied.kept[1] == {"a": [1]}
    assert copied.kept[1]["a"] is not model.kept[1]["a"]
    assert torch.equal(copied.table, model.table)
    assert copied.table is not model.table
    assert copied["one"][1].running_mean is not model["one"][1].running_mean
    assert copied["one"].missing is None
    copied["two"].extra, copied["two"]._buffers["new"] = 1, torch.zeros(1)
    assert not hasattr(shared, "extra")
    assert not hasattr(shared, "new")


def padded_ids(lengths: list[int], left: bool = False) -> Inputs:
    """Ids and a mask (batch, longest), all ids different."""
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = (mask.flip(1) if left else mask).long()
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    return Inputs((), {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("left", [False, True])
def test_padding_that_short_beginnings_do_not_show_is_tried_first(left: bool) -> None:
    called = padded_ids([101, 101, 101, 97, 53], left)
    first = next(iter(candidate_batches(called, LONGER)))
    mask, ids = first.kwargs["attention_mask"], first.kwargs["input_ids"]
    assert mask.shape == ids.shape == (3, 13)
    assert mask.all(1).tolist() == [True, False, True]  # none, most, and half-way
    assert mask.any(1).all()
    assert torch.equal(ids > 0, mask > 0)  # cut alike


def test_without_padding_beginnings_are_tried_first() -> None:
    for called in (padded_ids([101] * 5), padded_ids([101, 53]), padded_ids([31, 5, 3])):
        assert next(iter(candidate_batches(called, LONGER))).length == min(67, called.length)
    assert next(iter(candidate_batches(padded_ids([101, 97, 53])))).kwargs["attention_mask"].all()
