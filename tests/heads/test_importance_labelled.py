"""Importance by labels: the loss of the task by default, head by head as silencing shows it."""

import pytest
import torch
import transformers as hf
from tests.helpers.labelled import bert, tokenizer, write_csv, write_lines

import manyheads as mh
from manyheads.common.run_batch import run

TEXTS = ["ab cd", "e", "fgh ij k", "lm", "no pq r", "st", "uvw"]


@pytest.fixture
def classified(tmp_path):
    model = bert(hf.BertForSequenceClassification, num_labels=3)
    path = write_csv(tmp_path / "t.csv", {"text": TEXTS, "label": [0, 1, 2, 0, 1, 2, 0]})
    return model, mh.labelled(path, model, tokenizer(), batch_tokens=32)


def mean_loss(model, data):
    with torch.no_grad():
        return torch.cat([data.loss(run(model, batch), batch) for batch in data]).double().mean().item()


def test_leave_one_out_is_by_how_much_the_loss_of_the_labels_grows(classified):
    model, data = classified
    table = mh.importance(model, data, "leave-one-out")
    assert set(table["measure"]) == {"increase of the loss labels"}
    for row, value in zip(table.rows, table["importance"].tolist(), strict=True):
        before = mean_loss(model, data)
        with mh.silence(model, {row.site: [row.head]}):
            after = mean_loss(model, data)
        assert value == pytest.approx(after - before, abs=1e-5)


def test_gradient_is_the_slope_of_the_loss_of_the_labels(classified):
    model, data = classified
    table = mh.importance(model, data, "gradient")
    assert set(table["measure"]) == {"slope of the loss labels"}
    totals = torch.zeros(len(table), dtype=torch.float64)
    for example in data.examples:
        batch = data.task.batch([example])
        gates = {site: torch.ones(3, requires_grad=True) for site in dict.fromkeys(table["site"])}
        with mh.gates(model, gates):
            data.loss(run(model, batch), batch).sum().backward()
        slopes = {site: gate.grad for site, gate in gates.items()}
        totals += torch.stack([slopes[row.site][row.head] for row in table.rows]).abs().double()
    assert table["importance"].tolist() == pytest.approx((totals / len(data.examples)).tolist(), rel=1e-3)


def test_methods_without_a_loss_read_labelled_batches_as_they_read_others(classified):
    model, data = classified
    plain = [{name: x for name, x in batch.items() if name != "labels"} for batch in data]
    for method in ("fisher", "output-norm", "relevance"):
        labelled, without = (mh.importance(model, batches, method)["importance"] for batches in (data, plain))
        assert labelled.equal(without)


def test_labels_without_a_task_are_refused(classified):
    model, data = classified
    with pytest.raises(ValueError, match="loss 'labels' needs the batches of labelled"):
        mh.importance(model, [dict(batch) for batch in data], "gradient", loss="labels")


def test_heads_of_question_answering_are_measured_by_where_answers_are(tmp_path):
    model = bert(hf.BertForQuestionAnswering)
    rows = [
        {"question": "a b", "context": "cd ef gh", "answers": {"text": ["ef"], "answer_start": [3]}},
        {"question": "c", "context": "ij", "answers": {"text": ["ij"], "answer_start": [0]}},
    ]
    data = mh.labelled(write_lines(tmp_path / "qa.jsonl", rows), model, tokenizer())
    one = mh.importance(model, data, "leave-one-out", loss=None)
    assert set(one["measure"]) == {"increase of the loss labels"}
    plain = [{name: x for name, x in batch.items() if "positions" not in name} for batch in data]
    table = mh.importance(model, plain, "leave-one-out")
    row = table.rows[1]
    changes = []
    for example in data.examples:
        batch = data.task.batch([example])
        with torch.no_grad():
            full = run(model, batch)
            with mh.silence(model, {row.site: [row.head]}):
                other = run(model, batch)
        pairs = ((full.start_logits, other.start_logits), (full.end_logits, other.end_logits))
        each = [(a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum().item() for a, b in pairs]
        changes.append(sum(each) / 2)
    assert table["importance"][1].item() == pytest.approx(sum(changes) / 2, rel=1e-3)
    assert mh.importance(model, plain, "fisher")["importance"].isfinite().all()


def test_heads_of_a_regression_are_measured_by_how_far_its_amount_moves(tmp_path):
    model = bert(hf.BertForSequenceClassification, num_labels=1)
    batches = [dict(tokenizer()(text, return_tensors="pt")) for text in TEXTS[:3]]
    exact, fisher = (mh.importance(model, batches, method) for method in ("leave-one-out", "fisher"))
    assert set(exact["measure"]) == {"half the square of the change of the output"}
    for number, row in enumerate(exact.rows):
        changes, slopes = [], []
        for batch in batches:
            with torch.no_grad(), mh.silence(model, {row.site: [row.head]}):
                without = model(**batch).logits.item()
            gates = {site: torch.ones(3, requires_grad=True) for site in dict.fromkeys(exact["site"])}
            with mh.gates(model, gates):
                amount = model(**batch).logits.squeeze()
                amount.backward()
            changes.append((amount.item() - without) ** 2 / 2)
            slopes.append(gates[row.site].grad[row.head].item() ** 2 / 2)
        assert exact["importance"][number].item() == pytest.approx(sum(changes) / 3, rel=1e-3, abs=1e-7)
        assert fisher["importance"][number].item() == pytest.approx(sum(slopes) / 3, rel=1e-3, abs=1e-7)
    with pytest.raises(ValueError, match="loss 'labels' needs the batches of labelled"):
        mh.importance(model, batches, "gradient")
