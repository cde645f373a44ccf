"""Metrics against scikit-learn and sacrebleu, and intervals that cover."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from manyheads.data.labelled import metrics

CLASSES = st.integers(0, 4)
pairs = st.lists(st.tuples(CLASSES, CLASSES), min_size=1, max_size=30)


@settings(max_examples=20, deadline=None)
@given(pairs)
def test_macro_f1_is_that_of_scikit_learn(rows):
    truths, predictions = zip(*rows, strict=True)
    measured = metrics.macro_f1(truths, predictions)
    assert measured.mean == pytest.approx(f1_score(truths, predictions, average="macro", zero_division=0.0))
    assert 0 <= measured.low <= measured.high <= 1


@pytest.mark.parametrize("average", ["micro", "macro"])
def test_f1_of_several_classes_is_that_of_scikit_learn(average):
    random = np.random.default_rng(0)
    truths, predictions = random.integers(0, 2, (2, 23, 4))
    truths[:, 3] = predictions[:, 3] = 0  # a class that never occurs
    expected = f1_score(truths, predictions, average=average, zero_division=0.0)
    assert metrics.several_f1(truths, predictions, average).mean == pytest.approx(expected)


def test_bleu_and_chrf_are_those_of_sacrebleu():
    right = ["the cat sat on the mat today", "a dog ran over the hill", "birds fly"]
    written = ["the cat sat on a mat today", "a dog ran under the hill", "birds walk"]
    bleu = metrics.translation_score(right, written, "BLEU")
    assert bleu.mean == pytest.approx(sacrebleu.corpus_bleu(written, [right]).score)
    assert bleu.low < bleu.high
    chrf = metrics.translation_score(right, written, "CHRF")
    assert chrf.mean == pytest.approx(sacrebleu.corpus_chrf(written, [right]).score)


def slow_edits(a, b):
    if not a or not b:
        return len(a) + len(b)
    return min(slow_edits(a[1:], b) + 1, slow_edits(a, b[1:]) + 1, slow_edits(a[1:], b[1:]) + (a[0] != b[0]))


@settings(max_examples=30, deadline=None)
@given(st.text("ab", max_size=5), st.text("ab", max_size=5))
def test_edits_are_the_fewest(a, b):
    assert metrics.edits(a, b) == slow_edits(a, b)


def test_entities_are_counted_as_conll_counts_them():
    truth = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER"]
    assert sorted(metrics.entities(truth)) == [(0, 2, "PER"), (3, 4, "LOC"), (4, 5, "LOC"), (5, 6, "PER")]
    wrong_end = ["B-PER", "O", "O", "B-LOC", "B-LOC", "I-PER"]
    counts = [(len(metrics.entities(truth) & metrics.entities(wrong_end)), 4, 4)]
    assert metrics.f1_of_counts(counts).mean == pytest.approx(3 / 4)


def test_intervals_of_a_share_cover_it_about_95_times_in_100():
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        share = metrics.share((random.random(40) < 0.3).tolist())
        inside += share.low <= 0.3 <= share.high
    assert 180 <= inside <= 200


def test_the_bootstrap_is_the_same_every_time_and_near_the_standard_error():
    numbers = np.random.default_rng(2).normal(3, 1, 400)
    first, again = (metrics.ratio(numbers, np.ones(400)) for _ in range(2))
    assert first == again
    assert first.half == pytest.approx(1.96 * numbers.std() / 20, rel=0.1)


def test_answers_are_compared_as_squad_does():
    assert metrics.answer_f1("The tower", "a Tower!") == 1.0
    assert metrics.answer_f1("", "") == 1.0
    assert metrics.answer_f1("x", "") == 0.0
