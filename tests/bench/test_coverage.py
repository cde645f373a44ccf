"""The checker behind the table of architectures: it passes what is right, and notices what is not."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is not installed, it lives beside src/

import manyheads as mh
from bench import coverage, coverage_check, coverage_others, coverage_spy
from manyheads.heads.table import HeadTable

EVERYTHING = {*coverage_check.METRICS, *coverage_check.SOMETIMES}


def gpt() -> coverage_others.Case:
    """Three causal layers of five heads that are fused, or by hand in eager mode."""
    return coverage_others.OTHERS["nanoGPT style"]()


def altered(monkeypatch: pytest.MonkeyPatch, alter: Callable[[Any], None]) -> coverage_check.Verdict:
    """The verdict on that model when ``alter`` has had its hands on what was seen: ``sites``, ``table``."""

    class Altered:
        def __init__(self, model: nn.Module, **options: Any) -> None:
            self.watch = mh.watch(model, **options)

        def __enter__(self) -> Any:
            self.watch.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.watch.__exit__(*error)
            self.sites, self.table, self.missed = self.watch.sites, self.watch.table, {}
            alter(self)

    monkeypatch.setattr(coverage_check, "mh", SimpleNamespace(watch=Altered))
    return coverage_check.check(*gpt())


def with_sums(table: HeadTable, change: Callable[[str, Tensor], Tensor]) -> HeadTable:
    return replace(table, sums={name: change(name, value.clone()) for name, value in table.sums.items()})


def test_what_is_right_passes_with_every_metric_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = altered(monkeypatch, lambda seen: None)
    assert verdict.right, verdict.reasons
    assert (verdict.sites, verdict.attention, verdict.routes) == (3, True, {"softmax": 3})
    assert verdict.checked == dict.fromkeys(EVERYTHING, 3)
    assert verdict.worst < 1e-5
    assert verdict.excused == []


@pytest.mark.parametrize("metric", sorted(EVERYTHING))
def test_a_statistic_that_is_off_in_one_head_is_named(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(name: str, value: Tensor) -> Tensor:
        if name == metric:
            value[1, 7] += 0.1 * value[0, 7]  # layer 1, head 2
        return value

    verdict = altered(monkeypatch, lambda seen: setattr(seen, "table", with_sums(seen.table, off)))
    assert not verdict.right
    (reason,) = [reason for reason in verdict.reasons if "off by" in reason]
    assert f"h.1 (causal, 5 heads): {metric} off by" in reason


def test_a_token_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(seen: Any) -> None:
        seen.table = replace(seen.table, tokens=seen.table.tokens + 1.0)

    verdict = altered(monkeypatch, count)
    assert not verdict.right
    assert "tokens off by" in verdict.reasons[0]


def test_heads_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    order = [1, 0, *range(2, 15)]
    verdict = altered(
        monkeypatch,
        lambda seen: setattr(seen, "table", with_sums(seen.table, lambda _, value: value[:, order])),
    )
    assert not verdict.right
    assert "h.0 (causal, 5 heads)" in verdict.reasons[0]


def test_another_number_of_heads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_head(seen: Any) -> None:
        table, site = seen.table, seen.sites[0]
        site.heads = 1
        rows = [0, *range(5, 15)]
        kept = {name: value[:, rows] for name, value in table.sums.items()}
        seen.table = HeadTable([table.rows[i] for i in rows], table.tokens[rows], kept, table.model)

    verdict = altered(monkeypatch, one_head)
    assert not verdict.right
    assert "h.0 (causal, 1 heads)" in verdict.reasons[0]


def test_a_missing_site_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = altered(monkeypatch, lambda seen: seen.sites.pop(1))
    assert not verdict.right
    assert verdict.reasons == ["not seen: softmax (2, 5, 17, 17) in h.1 (_CausalSelfAttention)"]


def test_a_wrong_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = altered(monkeypatch, lambda seen: setattr(seen.sites[2], "ahead", True))
    assert not verdict.right
    assert "h.2: kind self, causal weights: True" in verdict.reasons


class PooledAttention(nn.Module):
    """Every second query, on all keys: they have no place among them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (3, 5)).transpose(1, 2)
        return (x[:, :, ::2] @ x.mT).softmax(-1) @ x


def test_numbers_where_there_should_be_none_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    x = torch.randn(2, 11, 15)
    model = nn.Sequential(PooledAttention())
    case = model, lambda m: m(x), lambda m: None
    verdict = coverage_check.check(*case)
    assert verdict.right, verdict.reasons
    assert "self" not in verdict.checked
    monkeypatch.setattr("manyheads.heads.call_statistics.OF_ONE_SEQUENCE", frozenset({"next"}))
    verdict = coverage_check.check(*case)
    assert not verdict.right


class ChoosingAttention(nn.Module):
    """No queries and keys: each position maps to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(7, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).view(2, 5, 1, 11).softmax(-1).sum(2)


class HiddenAttention(nn.Module):
    """Queries and keys, but no product that anybody could see."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x[:, :, None] * x[:, None]).sum(-1).unsqueeze(1).softmax(-1)
        return (weights.unsqueeze(-1) * x[:, None, None]).sum(-2)


def test_only_softmaxes_of_a_linear_map_are_excused() -> None:
    x = torch.randn(2, 5, 7)
    verdict = coverage_check.check(nn.Sequential(ChoosingAttention()), lambda m: m(x), lambda m: None)
    assert (verdict.right, verdict.attention) == (True, False)
    assert verdict.excused == ["0 (ChoosingAttention): a linear map of one sequence"]
    verdict = coverage_check.check(nn.Sequential(HiddenAttention()), lambda m: m(x), lambda m: None)
    assert (verdict.named, verdict.attention) == (True, True)
    assert "not seen: softmax (2, 1, 5, 5) in 0 (HiddenAttention)" in verdict.reasons


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) * 5**-0.5
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    return F.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1), 0.5, training=False) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) * 5**-0.5
    weights = (scores + torch.full((7, 7), -1e9).triu(1)).softmax(-1)
    return torch.einsum("...hqk,...hkd->...qhd", weights, v).transpose(1, 2)


def by_einsum_of_a_list(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", [q, k]) * 5**-0.5
    weights = (scores + torch.full((7, 7), -1e9).triu(1)).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", [weights, v])


@pytest.mark.parametrize("core", [by_kernel, by_hand, by_einsum, by_einsum_of_a_list])
def test_the_spy_writes_down_weights_scores_and_outputs(core: Callable[..., Tensor]) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 3, 7, 5).unbind(0)
    scores = (q @ k.mT * 5**-0.5).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    spy = coverage_spy.Spy(nn.Identity())
    with spy:
        out = core(q, k, v)
    (seen,) = spy.seen
    torch.testing.assert_close(seen.value, scores.softmax(-1))
    torch.testing.assert_close(seen.logit, scores.amax(-1))
    assert torch.equal(seen.keys, torch.arange(1, 8).expand(2, 3, 7))
    torch.testing.assert_close(seen.output, scores.softmax(-1) @ v)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


def test_the_spy_asks_torchs_module_for_each_head() -> None:
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(15, 3, batch_first=True)
    x = torch.randn(2, 7, 15)
    spy = coverage_spy.Spy(layer)
    with torch.no_grad(), spy.watching():
        out, averaged = layer(x, x, x)
    (seen,) = spy.seen
    q, k, v = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).view(2, 7, 3, 3, 5).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT * 5**-0.5
    torch.testing.assert_close(seen.value, scores.softmax(-1))
    torch.testing.assert_close(seen.logit, scores.amax(-1))
    torch.testing.assert_close(seen.output, scores.softmax(-1) @ v)
    torch.testing.assert_close(averaged, scores.softmax(-1).mean(1))
    torch.testing.assert_close(out, layer(x, x, x)[0])


def test_the_report_counts_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "names", lambda: (["a", "b", "c", "d", "e"], ["x"]))
    seen = {
        "sites": 2,
        "routes": {"sdpa": 2},
        "checked": {"output_norm": 1, "largest_logit": 2},
        "reason": "",
    }
    results = {
        "a": {"status": coverage.RIGHT, **seen},
        "b": {"status": coverage.WRONG, **seen, "reason": "attn: entropy off by 1.0e+00"},
        "c": {"status": coverage.NOT_RUN, "reason": "no inputs known for it"},
        "d": {"status": coverage.NO_ATTENTION, "sites": 0, "reason": "", "excused": ["m (Attention): a map"]},
        "x": {"status": coverage.RIGHT, **seen},
    }
    cut = {"a": {"status": "refused"}, "d": {"status": "no heads to spare"}}
    text = coverage.report(results, cut, {"b": {"status": "grown"}})
    assert [row.split("|")[7].strip() for row in text.splitlines()[2:7]] == ["refused", "", "", "", ""]
    assert [row.split("|")[8].strip() for row in text.splitlines()[2:7]] == ["", "grown", "", "", ""]
    assert (
        "5 entries in the model mapping, 4 tried: 3 run, 2 of those have attention, 1 of those are right, "
        "0 are not and say so, 1 are wrong without a word. Beyond transformers, of 1 tried: 1 right, 0 named"
    ) in text
    assert "- b is wrong: attn: entropy off by 1.0e+00" in text
    assert "- c does not run: no inputs known for it" in text
    assert "- d: m (Attention): a map" in text
    assert "largest_logit at 4 of 4 sites" in text
    assert "output_norm at 2 of 4 sites" in text
