"""Labels are all names or all numbers."""

import pytest

from manyheads.data.labelled.class_labels import Cell, list_of, match_classes

NAMES = {0: "1 star", 1: "2 stars", 2: "3"}


def cells(*values):
    return [Cell(f"line {n}", value) for n, value in enumerate(values, 2)]


def test_digits_that_are_the_name_of_a_class_are_a_name():
    assert match_classes(cells("3", "1 STAR "), NAMES, "f").classes == [2, 0]
    assert match_classes(cells("0", 2.0, True), NAMES, "f") == ([0, 2, 1], "numbers")


def test_numbers_of_a_file_that_names_them_are_matched_by_name():
    names = {0: "POSITIVE", 1: "NEGATIVE"}
    assert match_classes(cells(0, 1), names, "f", ["negative", "positive"]).classes == [1, 0]
    with pytest.raises(
        ValueError, match="f has the classes sad, glad; expected those of the model: POSITIVE, NEGATIVE"
    ):
        match_classes(cells(0, 1), names, "f", ["sad", "glad"])
    assert match_classes(cells(0, 1), {0: "LABEL_0", 1: "LABEL_1"}, "f", ["sad", "glad"]).classes == [0, 1]


@pytest.mark.parametrize("value", ["1.5", float("inf"), {"a": 1}, [1], "x" * 1000])
def test_what_is_no_class_is_one_sentence(value):
    with pytest.raises(ValueError, match="line 3 of f has the label") as caught:
        match_classes(cells(1, value), NAMES, "f")
    assert len(str(caught.value)) < 300


def test_lists_in_cells():
    assert list_of("[broken") == ["[broken"]
    assert list_of((1, 2)) == [1, 2]
    assert list_of(7) == [7]
