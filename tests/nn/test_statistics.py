"""Every statistic against its formula on the materialised weights, in float64, by both engines."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import formula
from tests.helpers.statistics import CORE, FULL, random, same

from manyheads.nn import block_statistics, mask, tile_statistics, tiles
from manyheads.nn.statistics import statistics, statistics_of_scores

SHAPES = {  # batch, heads, kv_heads, queries, keys, d_key
    "plain": (2, 3, 3, 37, 37, 5),
    "grouped": (2, 4, 2, 41, 41, 7),
    "several tiles": (1, 2, 1, 307, 307, 5),
    "cache": (2, 4, 1, 19, 101, 5),
    "one step": (2, 4, 2, 1, 67, 3),
    "more queries than keys": (2, 2, 2, 71, 29, 5),
    "one key": (1, 2, 1, 13, 1, 3),
    "one of each": (1, 1, 1, 1, 1, 1),
    "wide": (2, 4, 2, 41, 43, 53),
}


def masks(kind, batch, heads, queries, keys):
    """A mask, the same as a plain tensor, and its bias: by name."""
    generator = torch.Generator().manual_seed(3)
    lengths = [keys, keys // 2 + 1][:batch]
    padded = formula.allowed(queries, keys, lengths=lengths)
    shown = torch.rand(batch, 1, queries, keys, generator=generator) > 0.5
    bias = torch.randn(heads, queries, keys, dtype=torch.float64, generator=generator)
    ones = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    lowest = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    return {
        "all": (None, ones, None),
        "padding": (mask.padding(torch.tensor(lengths)), padded, None),
        "boolean": (shown, shown, None),
        "added": (bias, ones, bias),
        "alibi": (mask.alibi(heads), ones, formula.alibi(heads, queries, keys)),
        "hiding": (bias.masked_fill(~shown[0], -torch.inf), shown[:1], bias),
        "lowest": (lowest, ones, lowest),
    }[kind]


GEOMETRIES = [{}, {"causal": True}, {"window": 5}, {"chunk": 7}, {"causal": True, "window": 5, "chunk": 9}]


@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kind", ["all", "padding", "boolean", "added", "alibi", "hiding", "lowest"])
@pytest.mark.parametrize("shape", SHAPES)
def test_formulas(shape, kind, options, engine):
    q, k, features = random(SHAPES[shape])
    given, shown, bias = masks(kind, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    seen = formula.allowed(q.shape[2], k.shape[2], **options) & shown
    scores = formula.scores(q, k, bias)
    if kind == "lowest":  # hides whatever gets no weight: nothing in a row where it is all that there is
        top = scores.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        seen = seen & (scores - top > -1e3)
    expected = formula.statistics(scores, seen, features)
    for which, names in (("core", CORE), ("full", FULL)):
        found = statistics(q, k, mask=given, statistics=which, features=features, **options)
        same(found, expected, names | {"features"})
    assert found["features"].shape == (*q.shape[:3], 3)


@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("query_lengths", [None, [37, 5, 11]])
def test_padded_queries_and_empty_rows(options, query_lengths, engine):
    q, k, features = random((3, 4, 2, 37, 37, 5))
    lengths = [37, 0, 13]
    given = mask.padding(torch.tensor(lengths), query_lengths and torch.tensor(query_lengths))
    seen = formula.allowed(37, 37, lengths=lengths, query_lengths=query_lengths, **options)
    expected = formula.statistics(formula.scores(q, k), seen, features)
    for which, names in (("core", CORE), ("full", FULL)):
        found = statistics(q, k, mask=given, statistics=which, features=features, **options)
        same(found, expected, names | {"features"})
        assert (found["logsumexp"][1] == -torch.inf).all()
        assert all(not found[name][1].any() for name in names - {"logsumexp", "largest_logit"})


@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("lengths", [None, [83, 0, 31], [83, 70, 31]])
@pytest.mark.parametrize(("queries", "keys"), [(83, 83), (29, 83), (83, 29)])
def test_both_engines_agree(queries, keys, lengths, options, monkeypatch):
    """A mask that is a formula goes by blocks, the same mask as a tensor through tiles."""
    monkeypatch.setattr(block_statistics, "SHORTEST", 0)
    q, k, features = random((3, 4, 2, queries, keys, 5))
    given = None if lengths is None else mask.padding(torch.tensor(lengths).clamp(max=keys))
    dense = formula.allowed(queries, keys, lengths=lengths, **options)
    fused = statistics(q, k, mask=given, features=features, **options)
    tiled = statistics(q, k, mask=dense, features=features)
    same(fused, {name: value.double() for name, value in tiled.items()}, CORE | {"features"})


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (7, 0), (0, 0)])
@pytest.mark.parametrize("which", ["core", "full"])
@pytest.mark.parametrize("given", [None, torch.ones(1, 1, 1, 1, dtype=torch.bool)])
def test_nothing_at_all(queries, keys, which, given, engine):
    q, k, features = random((2, 4, 2, queries, keys, 5))
    found = statistics(q, k, mask=given, statistics=which, features=features)
    assert found.keys() == (CORE if which == "core" else FULL) | {"features"}
    for name, value in found.items():
        assert value.shape[:3] == (2, 4, keys if name == "received" else queries)
        assert (value == (-torch.inf if name in ("logsumexp", "largest_logit") else 0)).all(), name


@pytest.mark.parametrize("sizes", [(1, 1), (100, 3), (700, 16), (5000, 7)], ids=str)
@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
def test_any_tiling(monkeypatch, options, sizes):
    monkeypatch.setattr(tile_statistics, "ELEMENTS", sizes[0])
    monkeypatch.setattr(tiles, "TILE_ROWS", sizes[1])
    q, k, features = random((2, 4, 2, 23, 67, 3))
    given = mask.padding(torch.tensor([67, 31]))
    expected = formula.statistics(
        formula.scores(q, k), formula.allowed(23, 67, lengths=[67, 31], **options), features
    )
    found = statistics(q, k, mask=given, statistics="full", features=features, **options)
    same(found, expected, FULL | {"features"})


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("which", ["core", "full"])
def test_scale(scale, which, engine):
    q, k, _ = random(SHAPES["grouped"])
    expected = formula.statistics(formula.scores(q, k, scale=scale), formula.allowed(41, 41, causal=True))
    names = CORE if which == "core" else FULL
    same(statistics(q, k, causal=True, scale=scale, statistics=which), expected, names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["core", "full"])
def test_of_scores_equals_of_queries_and_keys(which, dtype):
    q, k, features = random(SHAPES["several tiles"])
    scores = formula.scores(q, k).masked_fill(~formula.allowed(307, 307, causal=True), -torch.inf).to(dtype)
    expected = formula.statistics(scores.double(), scores > -torch.inf, features)
    found = statistics_of_scores(scores, statistics=which, features=features)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4  # of a spread, the square root of a small number
    same(found, expected, (CORE if which == "core" else FULL) | {"features"}, tolerance)
    if dtype == torch.float64:
        again = statistics(q, k, causal=True, statistics=which, features=features)
        same(found, again, again.keys())


def test_no_gradient_and_float32_for_half_precision():
    q, k, _ = random(SHAPES["plain"], torch.bfloat16)
    for which in ("core", "full"):
        found = statistics(q.requires_grad_(), k, statistics=which)
        assert all(value.dtype == torch.float32 and not value.requires_grad for value in found.values())


modest = settings(max_examples=40, derandomize=True, deadline=None)


@modest
@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 9),
    sharpness=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_bounds(queries, keys, causal, window, sharpness, dtype):
    q, k, features = random((1, 4, 2, queries, keys, 3), dtype)
    found = statistics(q * sharpness, k, causal=causal, window=window, statistics="full", features=features)
    core = statistics(q * sharpness, k, causal=causal, window=window)
    something = found["keys"] > 0
    count = found["keys"].clamp(min=1)
    slack = 1e-4 if dtype == torch.float32 else 1e-9
    assert (found["entropy"] >= 0).all()
    assert (found["entropy"] <= count.log() + slack).all()
    assert (core["entropy"] >= 0).all()
    assert (core["entropy"] <= count.log() + slack * max(1.0, sharpness / 100)).all()  # a small difference
    shown = {name: value[something] for name, value in found.items() if name != "received"}
    assert (shown["collision"] >= 1 / count[something] - slack).all()
    assert (shown["collision"] <= shown["confidence"] + slack).all()
    assert (shown["confidence"] >= 1 / count[something] - slack).all()
    for name in ("confidence", "self", "previous", "next", "first", "local", "collision"):
        assert (found[name] >= 0).all()
        assert (found[name] <= 1 + slack).all()
    assert (found["local"] >= found["self"] + found["previous"] + found["next"] - slack).all()
    assert (found["distance"] >= 0).all()
    assert (found["distance_spread"] <= (keys - 1) / 2 + slack).all()
    assert (shown["logsumexp"] >= shown["largest_logit"] - slack * (1 + shown["largest_logit"].abs())).all()
    assert (shown["entropy"] >= -shown["confidence"].log() - slack).all()
    torch.testing.assert_close(found["received"].sum(-1), something.sum(-1).to(dtype), rtol=1e-4, atol=1e-4)
    assert (found["features"] <= features.amax() + slack).all()


def test_uniform_attention_has_known_numbers():
    q = torch.zeros(1, 1, 1, 3)
    found = {
        name: value.flatten()
        for name, value in statistics(q, torch.randn(1, 1, 9, 3), statistics="full").items()
    }
    assert math.isclose(found["entropy"], math.log(9), rel_tol=1e-6)
    assert math.isclose(found["collision"], 1 / 9, rel_tol=1e-6)
    assert math.isclose(found["distance"], 4.0, rel_tol=1e-6)
    assert math.isclose(found["distance_spread"], (60 / 9) ** 0.5, rel_tol=1e-6)
    assert math.isclose(found["local"], 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("sharpness", [1.0, 40.0])  # the second overflows exp, and is taken again
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 3}])
def test_the_largest_logit_without_the_full_set(options, sharpness):
    q, k = (torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(n)) for n in range(2))
    seen = statistics(sharpness * q, k, statistics="logits", **options)
    full = statistics(sharpness * q, k, statistics="full", **options)
    assert set(seen) == {*tile_statistics.LOGITS}
    for name, values in seen.items():
        assert torch.equal(values, full[name]), name
    if not options:
        scores = sharpness * q.double() @ k.double().mT / 5**0.5
        assert torch.allclose(seen["largest_logit"].double(), scores.amax(-1), rtol=1e-5, atol=1e-4)
