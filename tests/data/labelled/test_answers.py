"""Question answering: spans by offsets, the best answer by hand, answers behind the cut."""

import pytest
import torch
import transformers as hf
from tests.helpers.labelled import bert, tokenizer, write_csv, write_lines

import manyheads as mh
from manyheads.common.run_batch import run

ROWS = [
    {
        "question": "a b",
        "context": "cd ef. gh",
        "answers": {"text": ["ef", "ef. gh"], "answer_start": [3, 3]},
    },
    {"question": "c", "context": "ij kl mn", "answers": {"text": ["ij"], "answer_start": [0]}},
    {"question": "d e f", "context": "op op", "answers": {"text": ["op"], "answer_start": [3]}},
]


def model():
    return bert(hf.BertForQuestionAnswering)


def data_of(tmp_path, rows=ROWS, **options):
    return mh.labelled(write_lines(tmp_path / "squad.jsonl", rows), model(), tokenizer(), **options)


def by_question(data, question):
    size = {row["question"]: row for row in ROWS}[question]["context"]
    return next(example for example in data.examples if example.truth.context == size)


def test_answers_are_found_by_their_characters(tmp_path):
    data = data_of(tmp_path)
    # [CLS] a b [SEP] c ##d e ##f . g ##h [SEP]
    assert by_question(data, "a b").target == (6, 7)
    # [CLS] d e f [SEP] o ##p o ##p [SEP]: the second "op", since it starts at 3
    assert by_question(data, "d e f").target == (7, 8)


def test_the_loss_is_the_models_whatever_it_is_padded_with(tmp_path):
    data, qa = data_of(tmp_path), model()
    with torch.no_grad():
        alone = [qa(**data.task.batch([example])).loss.item() for example in data.examples]
        batch = data.task.batch(data.examples)
        result = run(qa, batch)
    assert data.loss(result, batch).tolist() == pytest.approx(alone, rel=1e-4)


def test_the_best_answer_is_the_best_of_all_pairs(tmp_path):
    data, qa = data_of(tmp_path), model()
    matches = []
    for example in data.examples:
        with torch.no_grad():
            result = run(qa, data.task.batch([example]))
        start, end = result.start_logits[0].tolist(), result.end_logits[0].tolist()
        offsets, context = example.truth.offsets, example.truth.context
        inside = [i for i, offset in enumerate(offsets) if offset is not None]
        first, last = max(
            ((i, j) for i in inside for j in inside if i <= j), key=lambda ij: start[ij[0]] + end[ij[1]]
        )
        text = context[offsets[first][0] : offsets[last][1]]
        assert data.task.answer(result.start_logits[0], result.end_logits[0], example.truth) == text
        matches.append(text.replace(".", "") in [right.replace(".", "") for right in example.truth.texts])
    measured = data.evaluate(qa)
    assert measured.metrics["exact_match"].mean == pytest.approx(sum(matches) / 3)
    assert set(measured.metrics) == {"exact_match", "f1", "loss"}


def test_questions_without_an_answer_may_be_answered_with_nothing(tmp_path):
    rows = [*ROWS, {"question": "q", "context": "r s", "answers": {"text": [], "answer_start": []}}]
    data = data_of(tmp_path, rows)
    nothing = next(example for example in data.examples if not example.truth.texts)
    assert nothing.target == (0, 0)
    logits = torch.zeros(nothing.size)
    logits[0] = 9.0
    assert data.task.answer(logits, logits, nothing.truth) == ""
    assert data_of(tmp_path).task.answer(logits, logits, nothing.truth) != ""


def test_answers_behind_the_cut_are_left_out_and_noted(tmp_path):
    data = data_of(tmp_path, max_length=7)
    assert "2 of 3 rows (66.7%) have their answer behind the cut and are left out" in data.notes
    assert len(data.examples) == 1


def test_answers_as_plain_text_are_looked_up(tmp_path):
    columns = {"question": ["a", "b"], "context": ["cd ef", "gh ij"], "answer": ["ef", "gh"]}
    data = mh.labelled(write_csv(tmp_path / "qa.csv", columns), model(), tokenizer())
    assert sorted(example.shown for example in data.examples) == ["ef", "gh"]
    columns["answer"][1] = "xy"
    with pytest.raises(ValueError, match=r"line 3 of .* has the answer 'xy', which is not in its context"):
        mh.labelled(write_csv(tmp_path / "qa.csv", columns), model(), tokenizer())
