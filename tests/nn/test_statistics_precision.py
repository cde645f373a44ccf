"""Statistics stay right where numbers get hard: keys far from zero, half precision, long sequences; and
what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies
from tests.helpers import formula
from tests.helpers.statistics import CORE, FULL, random, same

from manyheads.nn import mask
from manyheads.nn.statistics import statistics, statistics_of_scores

TOLERANCES = {  # absolute, plus the same relative; without centred keys each of the first is ten times off
    "entropy": 1e-5, "self": 1e-5, "previous": 1e-5, "next": 1e-5, "first": 1e-5, "confidence": 1e-5,
    "collision": 1e-5, "local": 1e-5, "features": 1e-5, "received": 1e-4, "distance": 1e-3,
    "distance_spread": 1e-2, "keys": 0.0, "logsumexp": 1e-3, "largest_logit": 1e-3,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["formula", "tensor"])
@pytest.mark.parametrize("which", ["core", "full"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 11}, {"causal": 1, "chunk": 29}], ids=str
)
@pytest.mark.parametrize("offset", [100.0, -1000.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_far_from_zero(dtype, offset, options, which, kind, engine):
    """The oracle sees the very numbers the statistics see, after their rounding to the dtype."""
    q, k, features = random((2, 4, 2, 131, 131, 8), dtype, offset)
    seen = formula.allowed(131, 131, lengths=[131, 67], **options)
    expected = formula.statistics(formula.scores(q, k), seen, features)
    if kind == "tensor":
        found = statistics(q, k, mask=seen, statistics=which, features=features)
    else:
        padding = mask.padding(torch.tensor([131, 67]))
        found = statistics(q, k, mask=padding, statistics=which, features=features, **options)
    for name in (CORE if which == "core" else FULL) | {"features"}:
        same({name: found[name]}, expected, {name}, TOLERANCES[name])


@pytest.mark.parametrize("which", ["core", "full"])
def test_very_sharp_attention(which, engine):
    q, k, _ = random((1, 2, 2, 131, 131, 8), torch.float32)
    found = statistics(100 * q, k, causal=True, statistics=which)
    expected = formula.statistics(formula.scores(100 * q, k), formula.allowed(131, 131, causal=True))
    torch.testing.assert_close(found["entropy"].double(), expected["entropy"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found["self"].double(), expected["self"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "padding"}, {"mask": "bias"}], ids=str)
@pytest.mark.parametrize("size", [60.0, 300.0, -300.0])
def test_scores_too_large_for_exp(options, size):
    """One head of three has scores whose exp overflows, or vanishes for all keys of a query."""
    q, k, _ = random((2, 3, 3, 37, 37, 5), torch.float32)
    q[:, 1] *= 40
    seen, bias = formula.allowed(37, 37, causal=options.get("causal", False)), None
    if options.get("mask") == "padding":
        options = {"mask": mask.padding(torch.tensor([37, 11]))}
        seen = formula.allowed(37, 37, lengths=[37, 11])
    elif options.get("mask") == "bias":
        bias = torch.full((1, 3, 37, 1), size)
        options = {"mask": bias}
    else:
        k[:, 1, :, 0] += size * (torch.arange(37) % 5 == 0)
    expected = formula.statistics(formula.scores(q, k, bias), seen)
    found = statistics(q, k, statistics="full", **options)
    for name in FULL - {"distance_spread", "keys"}:
        same({name: found[name]}, expected, {name}, 2e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_spread_and_distance_at_length_4099(causal):
    """In float32, where E[j^2] - E[j]^2 would be off by whole positions."""
    q, k, _ = random((1, 1, 1, 4099, 4099, 4), torch.float32)
    k[:, :, 3000:] += 2 * q[:, :, :1]  # some queries look at the far end, some do not
    seen = formula.allowed(4099, 4099, causal=causal)
    found = statistics(q, k, causal=causal, statistics="full")
    rows = slice(4000, 4099) if causal else slice(0, 99)
    scores = formula.scores(q, k)
    p = formula.softmax(scores[:, :, rows], seen[:, :, rows])
    i, j = (x.double() for x in formula.positions(4099, 4099))
    mean = (p * j).sum(-1, keepdim=True)
    spread = (p * (j - mean).square()).sum(-1).sqrt()
    torch.testing.assert_close(found["distance_spread"][:, :, rows].double(), spread, rtol=0, atol=1e-2)
    distance = (p * (i[rows] - j).abs()).sum(-1)
    torch.testing.assert_close(found["distance"][:, :, rows].double(), distance, rtol=1e-5, atol=5e-3)
    entropy = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(found["entropy"][:, :, rows].double(), entropy, rtol=0, atol=1e-4)


def test_spread_of_one_far_key_is_zero():
    q = torch.full((1, 1, 4099, 1), 1e3)
    k = torch.zeros(1, 1, 4099, 1)
    k[..., 7, :] = 1.0
    found = statistics(q, k, statistics="full")
    assert found["distance_spread"].max() < 1e-2
    torch.testing.assert_close(found["distance"][0, 0], (torch.arange(4099) - 7).abs().float())


def test_what_is_refused():
    q, k, features = random((2, 4, 2, 5, 7, 3))
    with pytest.raises(ValueError, match="statistics: expected 'core', 'logits' or 'full', got 'all'"):
        statistics(q, k, statistics="all")
    with pytest.raises(ValueError, match=r"features: expected .* = \(2, 7, n\), got \(2, 5, 3\)"):
        statistics(q, k, features=features[:, :5])
    with pytest.raises(ValueError, match=r"features: expected .* got \(2, 7\)"):
        statistics(q, k, features=features[..., 0])
    with pytest.raises(ValueError, match=r"q: expected \(batch, heads, .* got shape \(4, 5, 3\)"):
        statistics(q[0], k)
    with pytest.raises(ValueError, match="k: expected the width of q, 3, got 2"):
        statistics(q, k[..., :2])
    with pytest.raises(TypeError, match=r"k: expected the dtype of q, torch.float64, got torch.float32"):
        statistics(q, k.float())
    with pytest.raises(TypeError, match=r"mask: got a tensor of torch.int32"):
        statistics(q, k, mask=torch.ones(5, 7, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"mask: shape \(7, 5\) does not broadcast"):
        statistics(q, k, mask=torch.ones(7, 5) > 0)
    with pytest.raises(ValueError, match="window: expected at least 1, got 0"):
        statistics(q, k, window=0)
    with pytest.raises(ValueError, match=r"scores: expected \(batch, heads, queries, keys\), got \(5, 7\)"):
        statistics_of_scores(torch.zeros(5, 7))
    with pytest.raises(ValueError, match="statistics: expected 'core', 'logits' or 'full', got 'all'"):
        statistics_of_scores(torch.zeros(1, 1, 5, 7), statistics="all")


HIDDEN = 1e3


def of_weights(scores, features=None):
    """The formula, in float64, for rows that sum to one over the scores that get a weight at all."""
    top = scores.double().amax(-1, keepdim=True)
    shown = (scores.double() - top > -HIDDEN) & (scores > -torch.inf)
    return formula.statistics(scores.double(), shown, features)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=strategies.integers(0, 10**6),
    shift=strategies.sampled_from([0.0, 80.0, 95.0, 6000.0, -6000.0, -1e5, -1e9]),
    hiding=strategies.sampled_from([-torch.inf, -1e4, -1e9, torch.finfo(torch.float32).min, -2e3]),
    dtype=strategies.sampled_from([torch.float32, torch.float64]),
    which=strategies.sampled_from(["core", "full"]),
)
def test_only_differences_of_scores_matter(seed, shift, hiding, dtype, which):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, 7, 11, generator=generator, dtype=dtype) * 5 + shift
    hidden = torch.rand(2, 1, 7, 11, generator=generator) < 0.3
    hidden[0, 0, 2] = True  # nothing but hidden keys: a softmax of finite scores is what it is
    scores = scores.masked_fill(hidden, -torch.inf) if hiding == -torch.inf else scores + hiding * hidden
    found = statistics_of_scores(scores, statistics=which)
    expected = of_weights(scores)
    for name, value in found.items():
        wanted = expected[name]
        if name in ("logsumexp", "largest_logit"):
            assert torch.equal(value == -torch.inf, wanted == -torch.inf)
            value, wanted = (x.double().masked_fill(wanted == -torch.inf, 0.0) for x in (value, wanted))
        size = max(1.0, float(wanted.abs().max()))
        tolerance = 1e-6 if dtype == torch.float64 else max(2e-4, TOLERANCES[name])
        assert torch.allclose(value.double(), wanted, rtol=0, atol=tolerance * size), name


@pytest.mark.parametrize("engine_keys", [11, 300])  # by tiles and by blocks
@pytest.mark.parametrize("which", ["core", "full"])
@pytest.mark.parametrize("width", [4, 5])
def test_a_hidden_score_that_overflows_leaves_no_trace(engine_keys, which, width):
    generator = torch.Generator().manual_seed(width)
    q, k = (torch.randn(2, 3, engine_keys, width, generator=generator) for _ in range(2))
    q[:, :, 3], k[:, :, 5] = 40.0, 40.0  # a score of thousands, where exp is infinite
    lengths, queries = torch.tensor([engine_keys, 4]), torch.tensor([engine_keys, 3])
    padded = mask.padding(lengths, queries=queries)
    features = torch.rand(2, engine_keys, 2, generator=generator)
    seen = formula.allowed(
        engine_keys, engine_keys, causal=True, lengths=lengths.tolist(), query_lengths=queries.tolist()
    )
    expected = formula.statistics(formula.scores(q, k), seen, features)
    found = statistics(q, k, mask=padded, causal=True, statistics=which, features=features)
    assert (found["keys"][1, :, 3:] == 0).all()
    for name, value in found.items():
        assert not value.isnan().any(), name
        if name not in ("logsumexp", "largest_logit"):
            slack = 1e-2 if name == "distance_spread" else 5e-3
            assert torch.allclose(value.double(), expected[name], rtol=1e-4, atol=slack), name


@pytest.mark.parametrize("hidden", [-torch.inf, -1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shift", [0.0, -6000.0, 1000.0])
def test_a_bias_hides_what_gets_no_weight_from_it(hidden, shift):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 3, 7, 5, generator=generator) for _ in range(2))
    bias = torch.full((7, 7), shift).masked_fill(torch.ones(7, 7).triu(1).bool(), hidden)
    plain = statistics(q, k, causal=True, statistics="full")
    found = statistics(q, k, mask=bias, statistics="full")
    for name, value in found.items():
        moved = shift if name in ("logsumexp", "largest_logit") else 0.0
        error = 1e-2 if name == "distance_spread" else 2e-3 if shift else 1e-4
        assert torch.allclose(value, plain[name] + moved, rtol=1e-5, atol=error), name


def test_a_query_whose_keys_all_have_the_lowest_score_attends_to_all_of_them():
    lowest = torch.finfo(torch.float32).min
    found = statistics_of_scores(torch.full((1, 1, 1, 4), lowest), statistics="full")
    assert found["keys"].item() == 4
    assert found["entropy"].item() == pytest.approx(math.log(4))
    assert found["received"].flatten().tolist() == pytest.approx([0.25] * 4)
    nothing = statistics_of_scores(torch.full((1, 1, 1, 4), -torch.inf), statistics="full")
    assert nothing["keys"].item() == nothing["entropy"].item() == nothing["received"].sum().item() == 0


def test_first_queries_that_stand_before_every_key_leave_no_trace_in_blocks():
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 2, 320, 4, generator=generator), torch.randn(1, 2, 300, 4, generator=generator)
    q[:, :, 7], k[:, :, 5] = 40.0, 40.0
    features = torch.rand(1, 300, 2, generator=generator)
    found = statistics(q, k, causal=True, features=features)
    assert (found["keys"][..., :20] == 0).all()
    for name, value in found.items():
        wanted = -torch.inf if name == "logsumexp" else 0.0
        assert (value[:, :, :20] == wanted).all(), name
        assert not value.isnan().any(), name
