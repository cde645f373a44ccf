"""The structures that make attention fast: folded windows and chunks, row blocks, tiles, packed sequences.

Each is brought about, seen to be used, and held to the formula like everything else.
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers import formula
from tests.helpers.kernels import KERNELS, hold, random

from manyheads.nn import fused, mask, tiles
from manyheads.nn.attention import attention

everywhere = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The shapes (of q, of k) of every call that reaches torch's fused kernel."""
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def recording(q, k, *args, **kwargs):
        calls.append((tuple(q.shape), tuple(k.shape)))
        return original(q, k, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    return calls


WINDOWS = [  # queries, keys, window, causal: with blocks of max(64, window) queries
    (331, 331, 7, False),
    (331, 331, 7, True),
    (320, 320, 65, True),
    (397, 397, 67, False),
    (331, 331, 1, False),
    (331, 331, 64, True),
    (193, 397, 11, True),
    (193, 397, 11, False),
    (397, 193, 11, True),
    (397, 193, 11, False),
    (256, 449, 64, True),
    (449, 256, 64, False),
]


@pytest.mark.parametrize(("queries", "keys", "window", "causal"), WINDOWS)
@everywhere
def test_windows_over_many_blocks(kernel, queries, keys, window, causal):
    q, k, v = random((2, 2, 1, queries, keys, 3, 5))
    seen = formula.allowed(queries, keys, causal=causal, window=window)
    hold(kernel, q, k, v, seen, causal=causal, window=window)


@pytest.mark.parametrize("lengths", [[331, 67, 0], [200, 331, 129]])
@everywhere
def test_windows_over_padded_sequences(kernel, lengths):
    q, k, v = random((3, 2, 2, 331, 331, 3, 3))
    seen = formula.allowed(331, 331, causal=True, window=7, lengths=lengths, query_lengths=lengths)
    both = torch.tensor(lengths)
    hold(kernel, q, k, v, seen, causal=True, window=7, mask=mask.padding(both, queries=both))


def test_a_window_computes_only_what_is_near(kernel_calls):
    q, k, v = random((1, 2, 1, 1024, 1024, 3, 3))
    attention(q, k, v, window=32, causal=True)
    computed = sum(q[0] * q[2] * k[2] for q, k in kernel_calls)
    assert computed <= 1024 * (64 + 32)


def test_blocks_of_a_window_share_one_call(kernel_calls):
    q, k, v = random((1, 2, 1, 1024, 1024, 3, 3))
    attention(q, k, v, window=32, causal=True)
    assert max(q[0] for q, _ in kernel_calls) >= 14
    assert len(kernel_calls) <= 3


@pytest.mark.parametrize(("length", "chunk"), [(128, 32), (131, 32), (97, 96), (67, 1), (61, 60), (61, 61)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 3}, {"window": 3, "causal": True}], ids=str
)
@everywhere
def test_chunks_with_and_without_a_tail(kernel, options, length, chunk):
    q, k, v = random((2, 4, 2, length, length, 3, 5))
    hold(kernel, q, k, v, formula.allowed(length, length, chunk=chunk, **options), chunk=chunk, **options)


def test_a_chunk_computes_only_what_is_inside(kernel_calls):
    q, k, v = random((2, 2, 2, 131, 131, 3, 3))
    attention(q, k, v, chunk=16)
    computed = sum(q[0] * q[2] * k[2] for q, k in kernel_calls)
    assert computed == 2 * (8 * 16 * 16 + 3 * 3)


@pytest.mark.parametrize("elements", [1, 64, 500, 5000])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 71}, {"chunk": 29}], ids=str)
@pytest.mark.parametrize("kind", ["cache", "padding", "alibi", "boolean", "added"])
def test_masks_in_blocks_of_rows(monkeypatch, kernel_calls, kind, options, elements):
    monkeypatch.setattr(fused, "MASK_ELEMENTS", elements)
    monkeypatch.setattr(fused, "UNPAD_LENGTH", 10**9)
    q, k, v = random((2, 2, 2, 53, 79, 3, 3))
    generator = torch.Generator().manual_seed(3)
    given, lengths, shown, bias = None, None, True, None
    if kind == "padding":
        lengths = [79, 41]
        given = mask.padding(torch.tensor(lengths))
    elif kind == "alibi":
        given, bias = mask.alibi(2), formula.alibi(2, 53, 79)
    elif kind == "boolean":
        given = shown = torch.rand(2, 1, 53, 79, generator=generator) > 0.4
    elif kind == "added":
        given = bias = torch.randn(2, 53, 79, dtype=torch.float64, generator=generator)
    seen = formula.allowed(53, 79, lengths=lengths, **options) & shown
    hold("fused", q, k, v, seen, bias, mask=given, **options)
    if elements == 1 and (options or given is not None):
        assert len(kernel_calls) == 53
        assert all(q[2] == 1 for q, _ in kernel_calls)


@pytest.mark.parametrize("sizes", [(1, 1), (100, 3), (700, 16), (5000, 7), (100_000, 128)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 5}, {"chunk": 11}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "padding", "alibi", "boolean", "learned"])
def test_several_tiles(monkeypatch, kind, options, sizes):
    elements, rows = sizes
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(tiles, "TILE_ROWS", rows)
    q, k, v = random((3, 4, 2, 19, 29, 3, 5))
    generator = torch.Generator().manual_seed(3)
    given, lengths, shown, bias, learned = None, None, True, None, []
    if kind == "padding":
        lengths = [29, 0, 13]
        given = mask.padding(torch.tensor(lengths))
    elif kind == "alibi":
        given, bias = mask.alibi(4), formula.alibi(4, 19, 29)
    elif kind == "boolean":
        given = shown = torch.rand(3, 4, 19, 29, generator=generator) > 0.4
    elif kind == "learned":
        given = bias = torch.randn(4, 19, 29, dtype=torch.float64, generator=generator).requires_grad_()
        learned = [bias]
    seen = formula.allowed(19, 29, lengths=lengths, **options) & shown
    hold("tiled", q, k, v, seen, bias, learned=learned, mask=given, **options)


def test_tiles_leave_out_what_no_query_reaches(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ROWS", 16)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**9)
    cut = [*tiles.tiles(mask.causal() & mask.window(8), (1, 1, 1, 128), 128, 0)]
    assert sum(len(tile.rows) * len(tile.columns) for tile in cut) <= 128 * (16 + 8)
    lengths = mask.padding(torch.tensor([32, 0]))
    cut = [*tiles.tiles(lengths, (2, 1, 1, 128), 128, 0)]
    assert sum(len(tile.rows) * len(tile.columns) for tile in cut) == 128 * 32


@pytest.mark.parametrize("unpad", [1, 37, 38, 10**9])
@pytest.mark.parametrize("query_lengths", [None, [37, 5, 0]])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 5}, {"chunk": 11}], ids=str)
def test_packed_sequences(monkeypatch, kernel_calls, options, query_lengths, unpad):
    monkeypatch.setattr(fused, "UNPAD_LENGTH", unpad)
    q, k, v = random((3, 4, 2, 37, 37, 3, 5))
    lengths = [37, 5, 0]
    given = mask.padding(
        torch.tensor(lengths), None if query_lengths is None else torch.tensor(query_lengths)
    )
    seen = formula.allowed(37, 37, lengths=lengths, query_lengths=query_lengths, **options)
    hold("fused", q, k, v, seen, mask=given, **options)
    if unpad <= 37:
        assert all(q[0] == 1 or "chunk" in options for q, _ in kernel_calls)


def test_packed_sequences_compute_no_padding(kernel_calls):
    lengths = torch.tensor([128, 32, 64])
    q, k, v = random((3, 2, 2, 128, 128, 3, 3))
    attention(q, k, v, mask=mask.padding(lengths, queries=lengths), causal=True)
    assert sum(q[0] * q[2] * k[2] for q, k in kernel_calls) <= int(lengths.square().sum())


@pytest.mark.parametrize("contiguous", [1, 37, 38])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 5}, {"chunk": 11}], ids=str)
def test_layout_threshold(monkeypatch, options, contiguous):
    monkeypatch.setattr(fused, "CONTIGUOUS_LENGTH", contiguous)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random((2, 4, 2, 37, 37, 5, 5)))
    hold("fused", q, k, v, formula.allowed(37, 37, **options), **options)


@pytest.mark.parametrize("fold", [0, 1, 5, 64])
@pytest.mark.parametrize("shape", [(B, 1, Q, 29) for B in (1, 2) for Q in (1, 5)] + [(2, 6, 5, 29), (5, 29)])
def test_groups_folded_into_queries(monkeypatch, kernel_calls, shape, fold):
    monkeypatch.setattr(fused, "FOLD_QUERIES", fold)
    q, k, v = random((2, 6, 2, 5, 29, 3, 3))
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    hold("fused", q, k, v, formula.allowed(5, 29) & shown, mask=shown)
    folded = fold >= 5 and (len(shape) == 2 or shape[1] == 1)
    assert kernel_calls[0][0][1] == (2 if folded else 6)


def test_one_step_reads_shared_keys_once(kernel_calls):
    q, k, v = random((2, 8, 2, 1, 67, 3, 3))
    attention(q, k, v, causal=True)
    assert kernel_calls == [((2, 2, 4, 3), (2, 2, 67, 3))]


@pytest.mark.parametrize("kernel", ["auto", "reference", "fused", "tiled"])
@pytest.mark.parametrize("queries", [0, 1, 5, 70])
@pytest.mark.parametrize("keys", [0, 1, 5, 70])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("width", [0, 4])
def test_nothing_to_compute_is_no_error(batch, queries, keys, width, kernel):
    lengths = torch.full((batch,), 3)
    options = [
        {"mask": mask.padding(lengths)},
        {"mask": mask.padding(lengths, queries=lengths), "chunk": 3, "causal": True},
        {"mask": mask.padding(torch.zeros_like(lengths)), "window": 2},
        {"chunk": 3},
        {"window": 2, "causal": True},
        {"mask": mask.alibi(2)},
        {"dropout": 0.1},
    ]
    for given in options:
        q = torch.randn(batch, 2, queries, width, requires_grad=True)
        k, v = torch.randn(batch, 2, keys, width), torch.randn(batch, 2, keys, 3)
        out = attention(q, k, v, kernel=kernel, **given)
        assert out.shape == (batch, 2, queries, 3)
        assert out.isfinite().all(), given
        out.sum().backward()
        assert q.grad.isfinite().all(), given


@pytest.mark.parametrize("kernel", ["reference", "fused", "tiled"])
@pytest.mark.parametrize("heads", [1, 3, 5, 7, 8, 12])
def test_alibi_is_exact_in_float64(heads, kernel):
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(1, heads, 200, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    seen = formula.allowed(200, 200, causal=True)
    expected = formula.attention(q, k, v, seen, bias=formula.alibi(heads, 200, 200))
    out = attention(q, k, v, mask=mask.alibi(heads), causal=True, kernel=kernel)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
