"""The quality of a cut model on labelled rows is its task's, paired by row."""

import pytest
import torch
import transformers as hf
from tests.helpers.labelled import bert, gpt2, t5, tokenizer, write_csv, write_lines

import manyheads as mh
from manyheads.surgery.quality import compare_quality

TEXTS = ["ab cd", "e", "fgh ij k", "lm", "no pq r", "st", "uvw"]


def judged(model, data):
    small = mh.cut(model, {0: [1]}) if not isinstance(model, hf.T5ForConditionalGeneration) else model
    return small, compare_quality(model, small, data)


@pytest.mark.parametrize("kind", ["classes", "amounts", "words", "answers", "next", "hidden", "written"])
def test_quality_is_the_metric_of_the_task_before_and_after(tmp_path, kind):
    numbers = [0, 1, 2, 0, 1, 2, 0]
    if kind in ("classes", "amounts"):
        model = bert(hf.BertForSequenceClassification, num_labels=3 if kind == "classes" else 1)
        path = write_csv(tmp_path / "t.csv", {"text": TEXTS, "label": numbers})
    elif kind == "words":
        model = bert(hf.BertForTokenClassification, num_labels=3)
        path = write_lines(
            tmp_path / "t.jsonl", [{"tokens": t.split(), "tags": [1] * len(t.split())} for t in TEXTS]
        )
    elif kind == "answers":
        model = bert(hf.BertForQuestionAnswering)
        rows = {"question": TEXTS, "context": TEXTS, "answer": [text.split()[0] for text in TEXTS]}
        path = write_csv(tmp_path / "t.csv", rows)
    elif kind == "written":
        model = t5()
        path = write_csv(tmp_path / "t.csv", {"source": TEXTS, "target": TEXTS})
    else:
        model = gpt2(hf.GPT2LMHeadModel) if kind == "next" else bert(hf.BertForMaskedLM)
        path = write_csv(tmp_path / "t.csv", {"text": TEXTS})
    data = mh.labelled(path, model, tokenizer())
    small, quality = judged(model, data)
    named = {
        "accuracy": "accuracy",
        "squared error": "mean_squared_error",
        "exact match": "exact_match",
        "perplexity": "perplexity",
    }
    metric = named[quality.measure]
    assert quality.sequences == len(data.examples)
    assert quality.before.value == pytest.approx(data.evaluate(model).metrics[metric].mean, rel=1e-4)
    assert quality.after.value == pytest.approx(data.evaluate(small).metrics[metric].mean, rel=1e-4)


def test_prune_and_compare_take_labelled_rows(tmp_path):
    model = bert(hf.BertForSequenceClassification, num_labels=3)
    path = write_csv(tmp_path / "t.csv", {"text": TEXTS, "label": [0, 1, 2, 0, 1, 2, 0]})
    data = mh.labelled(path, model, tokenizer(), batch_tokens=32)
    for method in ("elimination", "gradient"):
        small = mh.prune(model, data, keep=0.5, method=method)
        card = mh.card(model, small, data, sizes=(1,), repeats=1)
        assert (card.measure, card.sequences) == ("accuracy", 7)
        assert card.before.quality == pytest.approx(data.evaluate(model).metrics["accuracy"].mean)
    assert model.config.problem_type is None


def test_heads_of_labelled_rows_are_inspected_as_those_of_others(tmp_path):
    model = bert(hf.BertForQuestionAnswering)
    rows = {"question": TEXTS, "context": TEXTS, "answer": [text.split()[0] for text in TEXTS]}
    data = mh.labelled(write_csv(tmp_path / "t.csv", rows), model, tokenizer())
    table = mh.inspect(model, data)
    plain = [{name: x for name, x in batch.items() if "positions" not in name} for batch in data]
    assert table["entropy"].equal(mh.inspect(model, plain)["entropy"])
    assert len(mh.diversity(model, data)) == len(mh.roles(model, data)) == 6
    assert torch.isfinite(table["entropy"]).all()
