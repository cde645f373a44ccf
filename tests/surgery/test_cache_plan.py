"""Which heads may forget: prices against an independent computation, the choice, the curve, bad input."""

import json
import math
import sys

import pytest
import torch
from tests.helpers.models import cached_llama, random_ids
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

import manyheads as mh
from manyheads import cli
from manyheads.common.language import choose_language
from manyheads.surgery.cache_curve import cache_curve
from manyheads.surgery.forgetting_price import TokenBatch, forgetting_prices

FIRST, WINDOW = 1, 5


def one_layer() -> nn.Module:
    """A model whose heads change the prediction of their own token only, so that prices are exact to second
    order; its weights are small, so that the second order is what counts.
    """
    model = cached_llama(heads=6, kv_heads=3, layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.003)
    return model


def test_prices_are_the_divergence_that_forgetting_causes():
    model, ids = one_layer(), random_ids(2, 23)
    many = ids.repeat(499, 1)  # tokens are drawn anew for each row
    price = forgetting_prices(model, [many], first=FIRST, window=WINDOW).by_text[0]
    with torch.no_grad():
        full = model(ids).logits.log_softmax(-1)
        for head in range(3):
            plan = mh.CachePlan.of(model, {0: [head]}, first=FIRST, window=WINDOW)
            forgetful = model(ids, past_key_values=mh.HeadwiseCache(model, plan)).logits.log_softmax(-1)
            divergence = (full.exp() * (full - forgetful)).sum(-1)[:, :-1].sum() / ids.numel()
            assert price[head] == pytest.approx(divergence.item(), rel=0.1)


def test_copies_price_only_the_tokens_that_could_be_copied():
    tokens = TokenBatch(random_ids(2, 41))
    planted, copied = tokens.planted(7)
    assert copied == 8
    assert torch.equal(planted.ids[:, -8:], tokens.ids[:, 8:16])
    assert torch.equal(planted.ids[:, :-8], tokens.ids[:, :-8])
    assert TokenBatch(random_ids(2, 9)).planted(7) is None
    model = cached_llama()
    sums = forgetting_prices(model, [tokens.ids], first=FIRST, window=WINDOW)
    assert sums.tokens == 82
    assert sums.copied == 2 * tokens.planted(FIRST + WINDOW)[1]
    assert set(sums.planted) == {0, 1}


def test_a_head_that_reads_nothing_far_costs_nothing():
    """Values of zero: whatever the head attends to, it puts out nothing."""
    model = cached_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[8:16] = 0.0  # key/value head 1
    sums = forgetting_prices(model, [random_ids(2, 23)], first=FIRST, window=WINDOW)
    assert sums.by_text[1][1] == 0
    assert (sums.by_text[1][[0, 2]] > 0).all()
    plan = mh.cache_plan(model, [random_ids(2, 23)], 5 / 6, first=FIRST, window=WINDOW)
    assert plan.forget == {1: [1]}


def test_our_own_decoder_and_padding():
    torch.manual_seed(0)
    model = mh.Decoder(24, heads=6, kv_heads=3, layers=2, vocabulary=101, positions="rotary").double()
    ids = random_ids(2, 29)
    alone = forgetting_prices(model, [ids[:1, :19]], first=FIRST, window=WINDOW)
    assert {layer: len(price) for layer, price in alone.text.items()} == {0: 3, 1: 3}
    lengths = {"x": ids, "lengths": torch.tensor([19, 29])}
    both = forgetting_prices(model, [lengths], first=FIRST, window=WINDOW)
    assert both.tokens == 48
    assert both.copied == 0  # nothing is planted into a padded batch
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_rounds_price_again_what_is_left():
    model, batches = cached_llama(), [random_ids(2, 29)]
    options = {"first": FIRST, "window": WINDOW, "protected": math.inf}
    once = mh.cache_plan(model, batches, 1 / 3, **options)
    twice = mh.cache_plan(model, iter(batches), 1 / 3, rounds=2, **options)
    assert once.forgetting == twice.forgetting == 4
    already = mh.cache_plan(model, batches, 2 / 3, **options)
    for layer, heads in already.forget.items():
        assert set(heads) <= set(twice.forget[layer])
        for head in heads:
            assert twice.prices[layer][head] == pytest.approx(once.prices[layer][head])
    sums = forgetting_prices(model, batches, first=FIRST, window=WINDOW, forget=already.forget)
    for layer, heads in already.forget.items():
        assert (sums.by_text[layer][heads] == 0).all()


def test_protected_heads_never_forget():
    model, batches = cached_llama(), [random_ids(2, 41)]
    options = {"first": FIRST, "window": WINDOW}
    plan = mh.cache_plan(model, batches, 0.5, **options, protect={0: [0], 1: [2]}, protected=math.inf)
    assert plan.forgetting == 3
    assert 0 not in plan.forget.get(0, [])
    assert 2 not in plan.forget.get(1, [])
    assert plan.protected == {0: [0], 1: [2]}
    with pytest.raises(ValueError, match="6 must keep everything"):
        mh.cache_plan(model, batches, 0.5, **options, protected=0.0)
    with pytest.raises(ValueError, match=r"expected at least 0\.334"):
        mh.cache_plan(model, batches, 0.1, **options, protect={0: [0], 1: [2]}, protected=math.inf)


def test_the_curve_is_that_of_the_dense_mask():
    model = cached_llama().float()
    plan = mh.cache_plan(model, [random_ids(2, 29)], 0.5, first=FIRST, window=WINDOW, protected=math.inf)
    batches = [random_ids(3, 31), random_ids(2, 23)]
    points = cache_curve(model, plan, batches, budgets=(0.0,))
    assert [point.forgetting for point in points] == [0, 3, 6]
    assert points[0].factor == pytest.approx(1.0)
    losses, counts = [], []
    for ids in batches:
        with torch.no_grad():
            logits = model(ids, past_key_values=mh.HeadwiseCache(model, plan)).logits[:, :-1]
        losses.append(nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="sum"))
        counts.append(ids[:, 1:].numel())
    expected = math.exp(sum(losses).item() / sum(counts))
    assert points[1].perplexity == pytest.approx(expected, rel=1e-4)
    assert points[1].share == pytest.approx(plan.share(31))


@pytest.mark.parametrize("budget", [-0.1, 1.5, math.nan, True, "half"])
def test_budgets_outside_of_0_to_1(budget):
    with pytest.raises(ValueError, match="budget: expected the share"):
        mh.cache_plan(cached_llama(), [random_ids(1, 29)], budget)


def test_no_number_of_nats():
    with pytest.raises(ValueError, match="protected: expected nats"):
        mh.cache_plan(cached_llama(), [random_ids(2, 40)], 0.5, first=1, window=8, protected=math.nan)


def test_bad_batches():
    model = cached_llama()
    for batches, message in (
        ([], "expected at least one"),
        ([random_ids(1, 6)], "nothing would be forgotten"),
        ([torch.randn(2, 3)], "expected token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            mh.cache_plan(model, batches, first=FIRST, window=WINDOW)
    with pytest.raises(ValueError, match="rounds"):
        mh.cache_plan(model, [random_ids(1, 29)], rounds=0)
    with pytest.raises(ValueError, match="no key/value head 9"):
        mh.cache_plan(model, [random_ids(1, 29)], protect={0: [9]})


@pytest.fixture
def folder(tmp_path):
    model = cached_llama().float()
    words = {f"w{n}": n for n in range(100)} | {"[UNK]": 100}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    lines = [" ".join(f"w{n}" for n in row) for row in random_ids(40, 11).tolist()]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def command(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["manyheads", "cache", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return done.value.code, capsys.readouterr()

    return run


SMALL = ("--text", "text.txt", "--length", "41", "--window", "5", "--texts", "4", "--protected", "9")


def test_the_command(command, folder):
    code, printed = command("model", *SMALL, "--budget", "0.5", "-o", "new/plan.json")
    assert code == 0, printed.err
    assert "6 key/value heads" in printed.out
    plan = mh.CachePlan.load(folder / "new" / "plan.json")
    assert plan.forgetting == 3
    code, printed = command("model", *SMALL, "--json", "-o", "plan.json")
    document = json.loads(printed.out)
    assert [point["forgetting"] for point in document["curve"]] == [0, 1, 3, 4]
    assert document["out"] == "plan.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", *SMALL, "--budget", "2"), "budget: expected the share"),
        (("model", *SMALL[:-2], "--protected", "0", "--budget", "0.2"), "must keep everything"),
        (("model", *SMALL, "--length", "7"), "no longer than what a head keeps"),
        (("model", *SMALL, "--length", "400"), "fewer than two pieces"),
        (("model", *SMALL, "--texts", "1"), "texts: expected at least 2"),
        (("model", *SMALL, "--protected", "nan"), "protected: expected nats"),
        ((*SMALL,), "expected a causal model"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_file(command, folder, arguments, message):
    code, printed = command(*arguments, "-o", "new/plan.json")
    assert code == 2
    assert message in printed.err
    assert not (folder / "new").exists()


@pytest.mark.parametrize(("out", "message"), [("model", "is a folder"), ("text.txt/plan.json", "is a file")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, out, message):
    code, printed = command("model", *SMALL, "-o", out)
    assert code == 2
    assert message in printed.err
    assert printed.out == ""


def test_the_command_in_chinese(command):
    code, printed = command("model", *SMALL, "--budget", "0.5", "-o", "plan.json", "--language", "zh")
    choose_language(None)
    assert code == 0, printed.err
    for word in ("6 个键/值头", "困惑度", "会遗忘的头", "方案在 plan.json"):
        assert word in printed.out
    assert "perplexity" not in printed.out
