"""Texts with classes, amounts or several classes, and labels of words: against the model's own loss."""

import copy

import pytest
import torch
import transformers as hf
from sklearn.metrics import f1_score
from tests.helpers.labelled import bert, gpt2, tokenizer, write_csv, write_lines

import manyheads as mh
from manyheads.common.run_batch import run

TEXTS = ["ab cd", "e", "fgh ij k", "lm", "no pq r", "st", "uvw"]
STARS = ["bad", "good", "fine", "Good", "bad", "bad", "fine"]
NAMES = {0: "bad", 1: "fine", 2: "good"}


def reviews(tmp_path, labels=STARS, **columns):
    return write_csv(tmp_path / "reviews.csv", {"review": TEXTS, "stars": labels, **columns})


def classifier(**changes):
    return bert(hf.BertForSequenceClassification, id2label=NAMES, **changes)


def own_loss(model, data):
    """The loss of each row as the model itself computes it, alone in its batch."""
    model = copy.deepcopy(model)  # it writes the kind of problem into its config
    losses = []
    with torch.no_grad():
        for example in data.examples:
            losses.append(model(**data.task.batch([example])).loss.item())
    return losses


def loss_of(model, data):
    with torch.no_grad():
        batch = data.task.batch(data.examples)
        return data.loss(run(model, batch), batch)


def test_the_loss_of_each_row_is_the_models_whatever_it_is_padded_with(tmp_path):
    model = classifier()
    before = model.config.to_dict()
    data = mh.labelled(reviews(tmp_path), model, tokenizer(), text="review", label="stars")
    assert loss_of(model, data).tolist() == pytest.approx(own_loss(model, data), rel=1e-4)
    data.evaluate(model)
    mh.importance(model, data, "gradient")
    assert model.config.to_dict() == before


def test_metrics_are_those_of_the_likeliest_classes(tmp_path):
    model = classifier()
    data = mh.labelled(reviews(tmp_path), model, tokenizer(), text="review", label="stars")
    truth = {
        text: {"bad": 0, "fine": 1, "good": 2}[star.lower()] for text, star in zip(TEXTS, STARS, strict=True)
    }
    true, chosen = [], []
    for text in TEXTS:
        logits = model(**tokenizer()(text, return_tensors="pt")).logits[0]
        chosen.append(int(logits.argmax()))
        true.append(truth[text])
    measured = data.evaluate(model)
    right = sum(a == b for a, b in zip(true, chosen, strict=True))
    assert measured.rows == 7
    assert measured.metrics["accuracy"].mean == pytest.approx(right / 7)
    assert measured.metrics["accuracy"].low < right / 7 < measured.metrics["accuracy"].high
    assert measured.metrics["f1_macro"].mean == pytest.approx(f1_score(true, chosen, average="macro"))
    assert measured.metrics["loss"].mean == pytest.approx(sum(own_loss(model, data)) / 7, rel=1e-4)


def test_labels_go_with_their_texts_whatever_the_order(tmp_path):
    data = mh.labelled(reviews(tmp_path), classifier(), tokenizer(), text="review", label="stars")
    pairs = {}
    for batch in data:
        for ids, number in zip(batch["input_ids"], batch["labels"].tolist(), strict=True):
            text = tokenizer().decode(ids, skip_special_tokens=True).replace(" ##", "")
            pairs[text.replace("##", "")] = NAMES[number]
    assert pairs == {text: star.lower() for text, star in zip(TEXTS, STARS, strict=True)}
    assert "names" in data.notes[0]


def test_two_texts_are_encoded_as_a_pair(tmp_path):
    rows = {"premise": ["a b", "c"], "hypothesis": ["d", "e f"], "label": [0, 2]}
    data = mh.labelled(write_csv(tmp_path / "pairs.csv", rows), classifier(), tokenizer())
    assert "'premise' and 'hypothesis'" in data.reading
    batch = data.task.batch(sorted(data.examples, key=lambda example: example.target))
    plain = tokenizer()(["a b", "c"], ["d", "e f"], return_tensors="pt", padding=True)
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert batch[name].equal(plain[name])


def test_regression_reads_numbers_and_says_correlations(tmp_path):
    model = bert(hf.BertForSequenceClassification, num_labels=1)
    numbers = [0.5, 1, -2, 3, 0, 1.5, 2]
    data = mh.labelled(reviews(tmp_path, numbers), model, tokenizer(), text="review", label="stars")
    assert data.task.kind == "regression"
    assert loss_of(model, data).tolist() == pytest.approx(own_loss(model, data), rel=1e-4)
    metrics = data.evaluate(model).metrics
    outputs = [model(**tokenizer()(text, return_tensors="pt")).logits.item() for text in TEXTS]
    expected = torch.corrcoef(torch.tensor([outputs, numbers]))[0, 1].item()
    assert metrics["pearson"].mean == pytest.approx(expected, rel=1e-4)
    squares = [(a - b) ** 2 for a, b in zip(outputs, numbers, strict=True)]
    assert metrics["mean_squared_error"].mean == pytest.approx(sum(squares) / 7, rel=1e-4)


def test_several_classes_may_be_right(tmp_path):
    model = classifier(problem_type="multi_label_classification")
    labels = ["bad", "bad, good", "fine", "good", "bad", "fine,bad", "good"]
    data = mh.labelled(reviews(tmp_path, labels), model, tokenizer(), text="review", label="stars")
    assert loss_of(model, data).tolist() == pytest.approx(own_loss(model, data), rel=1e-4)
    switches = [[1, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 0], [0, 0, 1]]
    true = torch.tensor(switches)
    chosen = torch.stack(
        [model(**tokenizer()(text, return_tensors="pt")).logits[0] > 0 for text in TEXTS]
    ).long()
    metrics = data.evaluate(model).metrics
    assert metrics["accuracy"].mean == pytest.approx((true == chosen).all(1).double().mean().item())
    assert metrics["f1_micro"].mean == pytest.approx(f1_score(true, chosen, average="micro"))


def test_a_model_that_cannot_find_the_end_of_padded_texts_reads_them_alone(tmp_path):
    model = gpt2(hf.GPT2ForSequenceClassification, id2label=NAMES)
    data = mh.labelled(reviews(tmp_path), model, tokenizer(), text="review", label="stars")
    assert {len(batch["input_ids"]) for batch in data} == {1}
    assert data.evaluate(model).rows == 7


def test_what_is_cut_and_what_has_no_label_is_noted(tmp_path):
    labels = ["bad", "", "fine", "good", "", "bad", "fine"]
    path = reviews(tmp_path, labels)
    data = mh.labelled(path, classifier(), tokenizer(), text="review", label="stars", max_length=6)
    assert "2 of 7 rows (28.6%) have no label and are left out" in data.notes
    assert "1 of 5 rows (20.0%) are longer than 6 tokens and were cut to that length" in data.notes
    assert len(data.examples) == 5
    assert max(data.sizes) == 6


# --- token classification ---

TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}
WORDS = [["ab", "c", "def"], ["g", "hi"], ["jk"], ["m", "no", "p", "qrs"]]
NER = [[1, 2, 0], [0, 3], [3], [0, 1, 2, 0]]


def test_labels_of_words_go_to_their_first_token(tmp_path):
    model = bert(hf.BertForTokenClassification, id2label=TAGS)
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in zip(WORDS, NER, strict=True)]
    data = mh.labelled(write_lines(tmp_path / "ner.jsonl", rows), model, tokenizer())
    by_words = {example.size: example for example in data.examples}
    assert by_words[8].target == [-100, 1, -100, 2, 0, -100, -100, -100]  # [CLS] a ##b c d ##e ##f [SEP]
    assert loss_of(model, data).tolist() == pytest.approx(own_loss(model, data), rel=1e-4)
    # words and their classes by hand
    true, chosen, sentences = [], [], []
    for words, tags in zip(WORDS, NER, strict=True):
        pieces = [letter if i == 0 else f"##{letter}" for word in words for i, letter in enumerate(word)]
        ids = [1, *tokenizer().convert_tokens_to_ids(pieces), 2]
        logits = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        starts = [1 + sum(len(word) for word in words[:n]) for n in range(len(words))]
        true += tags
        chosen += [logits[start] for start in starts]
        sentences.append((tags, [logits[start] for start in starts]))
    metrics = data.evaluate(model).metrics
    assert metrics["accuracy"].mean == pytest.approx(sum(map(int.__eq__, true, chosen)) / len(true))
    assert set(metrics) == {"accuracy", "f1_entities", "loss"}


def test_words_and_labels_of_different_numbers_are_refused(tmp_path):
    path = write_csv(tmp_path / "ner.csv", {"words": ["a b", "c d"], "tags": ["O O", "O"]})
    with pytest.raises(ValueError, match=r"line 3 of .* has 2 words and 1 labels"):
        mh.labelled(path, bert(hf.BertForTokenClassification, id2label=TAGS), tokenizer())


# --- refusals ---


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (
            ["bad"] * 6 + ["awful"],
            "line 8 of .* has the label 'awful'; expected one of bad, fine, good, or a number from 0 to 2",
        ),
        ([0, 1, 2, 3, 0, 1, 2], "line 5 of .* has the label '3'; numbers of classes count from 0; expected"),
        (
            ["bad", "fine", "good", "1", "2", "bad", "bad"],
            "line 5 of .* has the label '1', and line 2 has 'bad': all are names",
        ),
        ([-1] * 7, "every label of .* is -1"),
        ([""] * 7, "no row of .* has a label in the column 'stars'"),
    ],
)
def test_labels_that_do_not_fit_are_one_sentence(tmp_path, labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        mh.labelled(reviews(tmp_path, labels), classifier(), tokenizer(), text="review", label="stars")


def test_a_model_without_names_says_that_it_has_none(tmp_path):
    model = bert(hf.BertForSequenceClassification, num_labels=3)
    with pytest.raises(
        ValueError, match="has the label 'bad'; expected a number from 0 to 2: the model has no names"
    ):
        mh.labelled(reviews(tmp_path), model, tokenizer(), text="review", label="stars")


def test_a_text_for_a_number_is_refused(tmp_path):
    model = bert(hf.BertForSequenceClassification, num_labels=1)
    with pytest.raises(ValueError, match=r"line 2 of .* has the label 'bad'; expected a number"):
        mh.labelled(reviews(tmp_path), model, tokenizer(), text="review", label="stars")


def test_a_model_without_a_head_and_a_missing_column_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"BertModel.* has no task head"):
        mh.labelled(reviews(tmp_path), bert(hf.BertModel), tokenizer())
    with pytest.raises(ValueError, match=r"text-column: .* has no column 'body'; it has review, stars"):
        mh.labelled(reviews(tmp_path), classifier(), tokenizer(), text="body")
    with pytest.raises(ValueError, match="tokenizer: BertForSequenceClassification needs"):
        mh.labelled(reviews(tmp_path), classifier())


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    model = bert(hf.BertForSequenceClassification, id2label=NAMES, vocab_size=11)
    with pytest.raises(ValueError, match="expected 0 to 10, the model's vocabulary"):
        mh.labelled(reviews(tmp_path), model, tokenizer(), text="review", label="stars")
