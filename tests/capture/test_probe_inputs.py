"""The probe's contents."""

import pytest
import torch

from manyheads.capture.probe_inputs import Inputs, candidates, replaced


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
    for probe in candidates(called):
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
        i == 3 for i in range(7)
    ]
