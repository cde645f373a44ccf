"""Columns by name, by custom, or by being the only ones left."""

import pytest

from manyheads.data.labelled.columns import Customs, choose_columns
from manyheads.data.readers.records import Records

CUSTOMS = Customs((("text",), ("sentence1", "sentence2"), ("sentence",)), ("label", "stars"), (1, 2))


def columns(*names, **options):
    return tuple(choose_columns(Records("f.csv", list(names), []), CUSTOMS, **options))


def test_custom_and_names():
    assert columns("ID", "Text", "Label") == (("Text",), "Label")
    assert columns("sentence1", "sentence2", "text", "stars") == (("sentence1", "sentence2"), "stars")
    assert columns("body", "label") == (("body",), "label")
    assert columns("text", "verdict") == (("text",), "verdict")
    assert columns("a", "b", "c", text=["a", "c"], label="b") == (("a", "c"), "b")


@pytest.mark.parametrize(
    ("names", "options", "sentence"),
    [
        (
            ["a", "b", "label"],
            {},
            "text-column: which column of f.csv does the model read. It has a, b, label",
        ),
        (["text", "b", "c"], {}, "label-column: which column of f.csv has the labels. It has text, b, c"),
        (["text", "label"], {"label": "y"}, "label-column: f.csv has no column 'y'; it has text, label"),
        (
            ["a", "b", "c", "d"],
            {"text": ["a", "b", "c"]},
            "text-column: got a, b, c; expected 1 or 2 columns",
        ),
    ],
)
def test_what_cannot_be_decided_lists_what_is_there(names, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        columns(*names, **options)
