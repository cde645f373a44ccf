"""Labels in a file matched with the classes of a model: all by name, or all by number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SHOWN = 12  # classes that a message lists
_GENERIC = re.compile(r"LABEL_\d+")


class Cell(NamedTuple):
    """A label as a file has it, and where."""

    where: str
    value: object


class Matched(NamedTuple):
    """The classes of labels, and whether the labels are ``names`` or ``numbers``."""

    classes: list[int]
    by: str


def match_classes(
    labels: Sequence[Cell],
    names: Mapping[int, str],
    what: str,
    in_file: Sequence[str] | None = None,
) -> Matched:
    """The number of each label's class.

    Parameters
    ----------
    labels: what the file has, none of them missing.
    names: the model's classes, as `class_names` gives them.
    what: the file, for messages.
    in_file: what the numbers of the file stand for, where it says so.

    All labels are names of classes (upper or lower case), or all are numbers; a text of digits that is the
    name of a class is a name.

    >>> names = {0: "NEGATIVE", 1: "POSITIVE"}
    >>> match_classes([Cell("line 2", "positive"), Cell("line 3", "negative")], names, "a.csv")
    Matched(classes=[1, 0], by='names')
    >>> match_classes([Cell("line 2", "1"), Cell("line 3", 0)], names, "a.csv")
    Matched(classes=[1, 0], by='numbers')
    """
    by_name = {_plain(name): number for number, name in names.items()}
    if in_file is not None and all(_plain(name) in by_name for name in in_file):
        labels = [Cell(label.where, _name_of(label.value, in_file)) for label in labels]
    plain = [_plain(label.value) for label in labels]
    if all(text in by_name for text in plain):
        return Matched([by_name[text] for text in plain], "names")
    numbers = [_whole(label.value) for label in labels]
    if all(number in names for number in numbers):
        if in_file is not None and not _generic(names):
            raise ValueError(
                f"data: {what} has the classes {_list(in_file)}; expected those of the model: "
                f"{_list(names.values())}"
            )
        return Matched([number for number in numbers if number is not None], "numbers")
    if set(numbers) == {-1}:
        raise ValueError(f"data: every label of {what} is -1: this split has no labels; choose another one")
    raise _misfit(labels, plain, numbers, by_name, names, what)


def _misfit(
    labels: Sequence[Cell],
    texts: Sequence[str],
    numbers: Sequence[int | None],
    by_name: Mapping[str, int],
    names: Mapping[int, str],
    what: str,
) -> ValueError:
    """The error for labels that are neither all names nor all numbers: it has the first that misfits."""
    named = [i for i, text in enumerate(texts) if text in by_name]
    numbered = [i for i, number in enumerate(numbers) if number in names]
    fits = named if len(named) >= len(numbered) else numbered
    fitting = set(fits)
    misfit = next(i for i in range(len(labels)) if i not in fitting)
    expected = f"one of {_list(names.values())}, or a number from 0 to {max(names)}"
    if _generic(names):
        expected = f"a number from 0 to {max(names)}: the model has no names for its classes"
    detail = ""
    if fits and (misfit in named or misfit in numbered):
        first = labels[fits[0]]
        detail = f", and {first.where} has {first.value!r}: all are names, or all are numbers"
    elif numbers[misfit] is not None and numbers[misfit] == max(names) + 1:
        detail = "; numbers of classes count from 0"
    return ValueError(
        f"data: {labels[misfit].where} of {what} has the label {str(labels[misfit].value)[:60]!r}{detail}; "
        f"expected {expected}"
    )


def _generic(names: Mapping[int, str]) -> bool:
    return all(_GENERIC.fullmatch(name) for name in names.values())


def _plain(value: object) -> str:
    return str(value).strip().lower()


def _whole(value: object) -> int | None:
    """A label as a whole number: 1, 1.0, "1" and true are 1."""
    try:
        number = float(str(value)) if not isinstance(value, bool) else float(value)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None


def _name_of(value: object, names: Sequence[str]) -> object:
    number = _whole(value)
    return names[number] if number is not None and 0 <= number < len(names) else value


def _list(names: Iterable[str]) -> str:
    items = list(names)
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def number_of(label: Cell, what: str) -> float:
    """A label as a number, for regression.

    >>> number_of(Cell("line 2", "3.5"), "a.csv")
    3.5
    """
    try:
        value = float(str(label.value))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"data: {label.where} of {what} has the label {str(label.value)[:60]!r}; expected a number: the "
            "model has one output, and its labels are quantities"
        )
    return value


def list_of(value: object, separator: str | None = ",") -> list[object]:
    """A cell that holds several things: a list, a JSON list as text, or a text with separators.

    Parameters
    ----------
    value: the cell.
    separator: what is between two things; None for spaces.

    >>> list_of("a, b c"), list_of("a , b", None), list_of('["a", "b c"]'), list_of([1, 2])
    (['a', 'b c'], ['a', ',', 'b'], ['a', 'b c'], [1, 2])
    """
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                return list(json.loads(value))
            except (ValueError, TypeError):
                pass
        return [part.strip() for part in value.split(separator)]
    return list(value) if isinstance(value, list | tuple) else [value]
