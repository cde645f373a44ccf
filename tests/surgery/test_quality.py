"""Quality: the right measure for each model, its standard error, and what a few sequences cannot tell."""

import math

import pytest
import torch
import transformers as hf
from tests.helpers.models import bert_config
from torch import nn

import manyheads as mh
from manyheads.surgery.card import card
from manyheads.surgery.quality import compare_quality, estimate, quality_change


def classifier(seed=0):
    """A BERT with two classes, which it tells apart at random."""
    torch.manual_seed(seed)
    config = bert_config(vocab_size=37, max_position_embeddings=32, num_labels=2)
    return hf.BertForSequenceClassification(config).eval()


def ids(count, length=7, seed=1):
    return torch.randint(37, (count, length), generator=torch.Generator().manual_seed(seed))


def choices(model, x):
    with torch.no_grad():
        return model(x).logits.argmax(-1)


def test_a_classifier_is_judged_by_the_choices_that_stay():
    model, other, x = classifier(0), classifier(5), ids(40)
    found = compare_quality(model, other, [{"input_ids": x}])
    assert found.measure == "agreement"
    assert found.before.value == 1.0
    wanted = (choices(model, x) == choices(other, x)).double()
    assert found.after.value == pytest.approx(wanted.mean().item())
    assert found.after.se == pytest.approx((wanted.std() / math.sqrt(40)).item())
    assert 0 < found.after.value < 1


def test_where_there_are_labels_it_is_accuracy():
    model, other, x = classifier(0), classifier(5), ids(40)
    labels = choices(model, x)
    labels[:10] = 1 - labels[:10]
    found = compare_quality(model, other, [{"input_ids": x, "labels": labels}])
    assert found.measure == "accuracy"
    assert found.before.value == pytest.approx(0.75)
    assert found.after.value == pytest.approx((choices(other, x) == labels).double().mean().item())


def test_our_own_classifier_takes_no_labels_and_is_judged_by_them():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mh.Encoder(8, heads=2, layers=1, vocabulary=37), nn.Linear(8, 3)

        def forward(self, x):
            return {"logits": self.head(self.body(x).mean(1))}

    model = Small().eval()
    found = card(
        model, model, [{"x": ids(6), "labels": torch.zeros(6, dtype=torch.long)}], sizes=(1,), repeats=1
    )
    assert found.measure == "accuracy"
    assert found.sequences == 6


def test_a_perplexity_is_that_of_all_tokens_and_has_an_error():
    torch.manual_seed(0)
    model = mh.Decoder(12, heads=3, layers=2, vocabulary=37).eval()
    x = ids(5, 9)
    found = compare_quality(model, model, [x[:2], x[2:]])
    with torch.no_grad():
        logits = model(x)
    each = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:], reduction="none").double()
    assert found.measure == "perplexity"
    assert found.before.value == pytest.approx(each.mean().exp().item(), rel=1e-4)
    spread = (each.mean(1).std() / math.sqrt(5)).item()
    assert found.before.se == pytest.approx(found.before.value * spread, rel=1e-3)
    assert found.change.value == pytest.approx(1.0)


def test_longer_sequences_count_more():
    found = torch.tensor([[1.0, 30.0], [4.0, 10.0]]).double()
    assert estimate("cosine", found).value == pytest.approx(1.75)


def test_a_fall_on_three_texts_is_noise_and_the_same_fall_on_many_is_not():
    generator = torch.Generator().manual_seed(3)

    def texts(count):
        before = 4.4 + 0.5 * torch.randn(count, generator=generator)
        after = before - 0.18 + 0.25 * torch.randn(count, generator=generator)
        return [torch.stack([one, torch.full_like(one, 100.0)], 1).double() for one in (before, after)]

    few, many = quality_change("perplexity", *texts(3)), quality_change("perplexity", *texts(500))
    assert few.within_noise
    assert many.value == pytest.approx(math.exp(-0.18), rel=0.05)
    assert not many.within_noise


def test_one_sequence_says_nothing_about_its_error():
    found = torch.tensor([[1.0, 30.0]]).double()
    assert math.isnan(estimate("cosine", found).se)
    assert quality_change("cosine", found, found).within_noise


def test_the_card_says_what_it_was_measured_on_and_how_long_what_it_timed_was():
    model = classifier()
    found = card(model, model, [{"input_ids": ids(3, 11)}], sizes=(1, 2), repeats=1)
    rows = {what: after for what, _, after in found.rows()}
    assert "agreement, 3 held-out sequences" in rows
    assert "within noise" in rows["change, 95% interval"]
    assert {"batch 1 x 11 tokens, ms", "batch 2 x 11 tokens, ms"} <= set(rows)
    one = card(model, model, [{"input_ids": ids(1, 11)}], sizes=(1,), repeats=1)
    assert "no interval" in {what: after for what, _, after in one.rows()}["change"]
    assert one.as_json()["after"]["quality_se"] is None


def test_a_few_choices_that_all_stay_are_no_proof():
    model = classifier()
    found = compare_quality(model, model, [{"input_ids": ids(6)}])
    assert (found.before.value, found.before.se, found.after.value) == (1.0, 0.0, 1.0)
    assert 0.05 < found.after.se < 0.2
    assert found.change.low < -0.2
    assert found.change.within_noise
    many = compare_quality(model, model, [{"input_ids": ids(600)}])
    assert many.after.se < 0.01
