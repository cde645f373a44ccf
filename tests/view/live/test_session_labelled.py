"""The live page of a model with a task head, measured on rows with labels."""

import pytest
import transformers as hf
from tests.helpers.labelled import bert, tokenizer, write_csv

from manyheads.models.loaded import Loaded
from manyheads.view.live import endpoints
from manyheads.view.live.session import begin

TEXTS = ["ab cd", "e", "fgh ij k", "lm", "no pq r", "st", "uvw"]


def loaded(model):
    def none():
        raise ValueError("none")

    return Loaded("tiny", model, tokenizer, none)


@pytest.fixture
def live(tmp_path):
    model = bert(hf.BertForSequenceClassification, id2label={0: "bad", 1: "good"})
    path = write_csv(tmp_path / "reviews.csv", {"review": TEXTS, "stars": ["bad", "good"] * 3 + ["bad"]})
    return begin(loaded(model), data=str(path), columns={"text_column": "review", "label_column": "stars"})


def test_quality_is_that_of_the_task_and_the_command_names_the_data(live):
    now = endpoints.quality(live, {})
    assert (now["metric"], now["sequences"]) == ("accuracy", 7)
    assert now["before"] == pytest.approx(live.read.evaluate(live.model).metrics["accuracy"].mean)
    assert "reviews.csv --text-column review --label-column stars" in live.command
    assert live.kind == "class"
    assert live.samples


def test_answers_are_classes_by_name(live):
    reply = endpoints.input_result(live, endpoints.Input(text="ab cd")).answer
    assert {name for name, _ in reply["items"]} == {"bad", "good"}


def test_columns_without_data_are_refused():
    model = bert(hf.BertForSequenceClassification)
    with pytest.raises(ValueError, match="text-column: it is for --data"):
        begin(loaded(model), columns={"text_column": "review"})
