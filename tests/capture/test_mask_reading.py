"""Dense masks in fewer words: the same mask, entry by entry, and without tensors where that is possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.capture import mask_reading
from manyheads.capture.call import Call
from manyheads.capture.mask_reading import Visible, in_words
from manyheads.capture.site import Site
from manyheads.nn.mask import Mask

QUERIES = 11
I, J = torch.arange(QUERIES)[:, None], torch.arange(QUERIES)
CAUSAL = I >= J
LENGTHS = torch.tensor([11, 7, 5])
RIGHT = (LENGTHS[:, None] > J)[:, None, None]
LEFT = (11 - LENGTHS[:, None] <= J)[:, None, None]
HOLES = (J % 3 != 1)[None, None, None].repeat(3, 1, 1, 1)
WINDOW = CAUSAL & (I - J < 4)
BOTH_SIDES = (I - J).abs() < 3
PACKED = (J // 4)[:, None] == J // 4
PREFIX = CAUSAL | (J < 3)
ODD = torch.rand(3, 1, QUERIES, QUERIES, generator=torch.Generator().manual_seed(0)) > 0.5


@pytest.mark.parametrize("piece", [2**22, 40])
@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (torch.ones(1, 1, QUERIES, QUERIES, dtype=torch.bool), {}),
        (CAUSAL[None, None], {"causal": True}),
        (RIGHT, {"lengths": True}),
        (RIGHT.expand(-1, -1, QUERIES, -1), {"lengths": True}),
        (RIGHT & CAUSAL, {"causal": True, "lengths": True}),
        (LEFT & CAUSAL, {"causal": True, "tensors": (3, 1, 1, 11)}),
        ((LEFT & CAUSAL)[1:], {"causal": True, "tensors": (2, 1, 1, 11)}),
        (HOLES & CAUSAL, {"causal": True, "tensors": (3, 1, 1, 11)}),
        (WINDOW[None, None], {"causal": True, "window": 4}),
        (WINDOW & RIGHT, {"causal": True, "window": 4, "lengths": True}),
        (BOTH_SIDES[None, None], {"window": 3}),
        (BOTH_SIDES & RIGHT, {"window": 3, "lengths": True}),
        (PACKED[None, None], {"tensors": (1, 1, 11, 11)}),
        (PREFIX[None, None], {"tensors": (1, 1, 11, 11)}),
        (ODD, {"tensors": (3, 1, 11, 11)}),
        (CAUSAL.expand(1, 2, -1, -1), {"tensors": (1, 2, 11, 11)}),
        (RIGHT & RIGHT.mT, {"tensors": (3, 1, 11, 11)}),
        (torch.zeros(1, 1, QUERIES, QUERIES, dtype=torch.bool), {"lengths": True}),
        ((CAUSAL & RIGHT)[:, :, 6:], {"causal": True, "lengths": True}),
        ((CAUSAL & RIGHT)[:, :, -1:], {"lengths": True}),
        ((CAUSAL & LEFT)[:, :, -1:], {"tensors": (3, 1, 1, 11)}),
        (CAUSAL[None, None, :, :7], {"tensors": (1, 1, 11, 7)}),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_the_same_in_fewer_words(
    allowed: Tensor, words: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_reading, "PIECE", piece)
    batch, heads, queries, keys = allowed.shape
    found = in_words(allowed, batch, queries, keys)
    assert torch.equal(found.dense(queries, keys).expand(batch, heads, queries, keys), allowed)
    assert (found.causal, found.window) == (words.get("causal", False), words.get("window"))
    assert (found.lengths is not None) == words.get("lengths", False)
    assert [tuple(x.shape) for x in found.tensors] == ([words["tensors"]] if "tensors" in words else [])


def look(mask: Mask, queries: int, keys: int, batch: int = 3) -> Visible:
    x = torch.zeros(batch, 2, keys, 3)
    y = torch.zeros(batch, 2, queries, 3)
    return mask_reading.visible(Call(Site("a", 0, 2, (0, 1)), y, x, x, y, mask))


def added(allowed: Tensor, hiding: float) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, hiding)


@pytest.mark.parametrize("hiding", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
def test_added_masks_that_only_hide(hiding: float) -> None:
    found = look(Mask(tensors=(added(RIGHT & CAUSAL, hiding),)), QUERIES, QUERIES).mask
    assert not found.tensors
    assert found.causal
    assert found.lengths is not None
    assert torch.equal(found.lengths, LENGTHS)


def test_what_adds_to_the_scores_stays() -> None:
    bias = added(RIGHT & CAUSAL, -torch.inf)
    bias[0, 0, 10, 0] = 1e-3
    found = look(Mask(tensors=(bias,)), QUERIES, QUERIES)
    assert found.mask.tensors[0] is bias or torch.equal(found.mask.tensors[0], bias)
    assert found.ahead is False


def test_a_cache_longer_than_it_is_filled() -> None:
    """Queries 2 and 3 of a cache for 11 keys, of which 4 are there."""
    found = look(Mask(tensors=((CAUSAL & (J < 4))[None, None, 2:4],)), 2, QUERIES)
    assert (found.offset, found.keys, found.ahead) == (2, 4, False)
    assert (found.mask.causal, found.mask.tensors, found.mask.lengths) == (True, (), None)


def test_key_masks_keep_the_geometry_beside_them() -> None:
    found = look(Mask(causal=True, tensors=(RIGHT,)), QUERIES, QUERIES)
    assert (found.mask.causal, found.mask.tensors, found.keys) == (True, (), QUERIES)
    assert found.mask.lengths is not None
    assert torch.equal(found.mask.lengths, LENGTHS)
    assert found.real is not None
    assert torch.equal(found.real, RIGHT[:, 0, 0])
