"""Attention along a sequence: the same numbers as the maps have, and a picture."""

import pytest
import torch

import manyheads as mh
from manyheads.heads.along_sequence import along
from manyheads.view.figures.along_sequence import draw


def test_rows_are_the_means_of_maps(tmp_path):
    torch.manual_seed(0)
    model = mh.Encoder(12, heads=3, layers=2, vocabulary=7, positions="sinusoidal").eval()
    batches = [torch.randint(7, (2, 11)), torch.randint(7, (5, 11))]
    maps = [mh.maps(model, batch, {0: [0, 1, 2], 1: [0, 1, 2]}) for batch in batches]
    both = [torch.cat([found[site].weights for found in maps]) for site in maps[0]]
    for query in (None, 4, -1):
        found = along(model, batches, query)
        rows = [each.mean((0, 2)) if query is None else each[:, :, query].mean(0) for each in both]
        assert torch.allclose(found.weights, torch.cat(rows), atol=1e-6)
        assert torch.allclose(found.weights.sum(1), torch.ones(6), atol=1e-5)
    assert found.heads == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    path = tmp_path / "deep" / "along.png"
    draw([("one", found, "ACGTACGTACG"), ("two", found, "ACGTACGTACG")], path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(path.parent.iterdir()) == [path]


def test_sequences_of_other_lengths_are_refused():
    model = mh.Encoder(12, heads=3, layers=1, vocabulary=7).eval()
    with pytest.raises(ValueError, match="of 5 and of 7 tokens"):
        along(model, [torch.randint(7, (2, 5)), torch.randint(7, (2, 7))])
    with pytest.raises(ValueError, match="no self-attention was seen"):
        along(model, [])
