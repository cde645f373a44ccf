"""Statistics stay right where numbers get hard: keys far from zero, half precision, long sequences; and
what they refuse."""

from __future__ import annotations

import pytest
import torch
from tests.nn import formula
from tests.nn.test_statistics import CORE, FULL, random, same

from manyheads.nn import mask
from manyheads.nn.statistics import statistics, statistics_of_scores

TOLERANCES = {  # absolute, plus the same relative; without centred keys each of the first is ten times off
    "entropy": 1e-5, "self": 1e-5, "previous": 1e-5, "next": 1e-5, "first": 1e-5, "confidence": 1e-5,
    "collision": 1e-5, "local": 1e-5, "features": 1e-5, "received": 1e-4, "distance": 1e-3,
    "distance_spread": 5e-3, "keys": 0.0, "logsumexp": 1e-3, "largest_logit": 1e-3,
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
        found = statistics(q, k, mask=seen, which=which, features=features)
    else:
        padding = mask.padding(torch.tensor([131, 67]))
        found = statistics(q, k, mask=padding, which=which, features=features, **options)
    for name in (CORE if which == "core" else FULL) | {"features"}:
        same({name: found[name]}, expected, {name}, TOLERANCES[name])


@pytest.mark.parametrize("which", ["core", "full"])
def test_very_sharp_attention(which, engine):
    q, k, _ = random((1, 2, 2, 131, 131, 8), torch.float32)
    found = statistics(100 * q, k, causal=True, which=which)
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
    found = statistics(q, k, which="full", **options)
    for name in FULL - {"distance_spread", "keys"}:
        same({name: found[name]}, expected, {name}, 2e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_spread_and_distance_at_length_4099(causal):
    """In float32, where E[j^2] - E[j]^2 would be off by whole positions."""
    q, k, _ = random((1, 1, 1, 4099, 4099, 4), torch.float32)
    k[:, :, 3000:] += 2 * q[:, :, :1]  # some queries look at the far end, some do not
    seen = formula.allowed(4099, 4099, causal=causal)
    found = statistics(q, k, causal=causal, which="full")
    rows = slice(4000, 4099) if causal else slice(0, 99)
    scores = formula.scores(q, k)
    p = formula.softmax(scores[:, :, rows], seen[:, :, rows])
    i, j = (x.double() for x in formula.positions(4099, 4099))
    mean = (p * j).sum(-1, keepdim=True)
    spread = (p * (j - mean).square()).sum(-1).sqrt()
    torch.testing.assert_close(found["distance_spread"][:, :, rows].double(), spread, rtol=0, atol=5e-3)
    distance = (p * (i[rows] - j).abs()).sum(-1)
    torch.testing.assert_close(found["distance"][:, :, rows].double(), distance, rtol=1e-5, atol=5e-3)
    entropy = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(found["entropy"][:, :, rows].double(), entropy, rtol=0, atol=1e-4)


def test_spread_of_one_far_key_is_zero():
    q = torch.full((1, 1, 4099, 1), 1e3)
    k = torch.zeros(1, 1, 4099, 1)
    k[..., 7, :] = 1.0
    found = statistics(q, k, which="full")
    assert found["distance_spread"].max() < 5e-3
    torch.testing.assert_close(found["distance"][0, 0], (torch.arange(4099) - 7).abs().float())


def test_what_is_refused():
    q, k, features = random((2, 4, 2, 5, 7, 3))
    with pytest.raises(ValueError, match="which: expected 'core' or 'full', got 'all'"):
        statistics(q, k, which="all")
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
    with pytest.raises(ValueError, match="which: expected 'core' or 'full', got 'all'"):
        statistics_of_scores(torch.zeros(1, 1, 5, 7), which="all")
