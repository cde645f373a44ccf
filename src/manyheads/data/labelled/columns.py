"""Which columns of a table a task reads: those that are named, or those with customary names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyheads.data.readers.records import Records


class Customs(NamedTuple):
    """The customary names of the columns of a task.

    inputs: what the model reads, a tuple for each custom; the first that a table has is taken.
    label: names for what it is to answer; empty for a task that has no column for it.
    counts: how many columns the model may read.
    needs_label: whether there must be a column for the answer.
    """

    inputs: tuple[tuple[str, ...], ...]
    label: tuple[str, ...] = ()
    counts: tuple[int, ...] = (1,)
    needs_label: bool = True


class Columns(NamedTuple):
    """The columns that are read."""

    inputs: tuple[str, ...]
    label: str | None

    def __str__(self) -> str:
        """For people.

        >>> str(Columns(("premise", "hypothesis"), "label"))
        "texts from 'premise' and 'hypothesis', labels from 'label'"
        """
        texts = "texts" if len(self.inputs) > 1 else "inputs"
        inputs = f"{texts} from {' and '.join(map(repr, self.inputs))}"
        return inputs if self.label is None else f"{inputs}, labels from {self.label!r}"


def choose_columns(
    table: Records, customs: Customs, text: str | Sequence[str] | None = None, label: str | None = None
) -> Columns:
    """The columns to read: as named, or else by custom, or else the only ones that are left.

    >>> table = Records("t.csv", ["id", "sentence1", "sentence2", "label"], [])
    >>> customs = Customs((("text",), ("sentence1", "sentence2")), ("label",), (1, 2))
    >>> choose_columns(table, customs)
    Columns(inputs=('sentence1', 'sentence2'), label='label')
    >>> choose_columns(table, customs, text="id").inputs
    ('id',)
    """
    named = (text,) if isinstance(text, str) else tuple(text or ())
    for option, names in (("text-column", named), ("label-column", (label,) if label else ())):
        for name in names:
            if name not in table.columns:
                raise ValueError(
                    f"{option}: {table.what} has no column {name!r}; it has {_list_columns(table)}"
                )
    if named and len(named) not in customs.counts:
        raise ValueError(
            f"text-column: got {', '.join(named)}; expected {' or '.join(map(str, customs.counts))} "
            f"column{'s' if customs.counts != (1,) else ''}"
        )
    inputs = named or _customary(table, customs, label)
    if label is None and (customs.label or customs.needs_label):
        by_lower_name = {name.lower(): name for name in table.columns if name not in inputs}
        label = next((by_lower_name[name] for name in customs.label if name in by_lower_name), None)
        remaining = [name for name in table.columns if name not in inputs]
        if label is None and customs.needs_label and len(remaining) == 1:
            label = remaining[0]
        if label is None and customs.needs_label:
            raise ValueError(
                f"label-column: which column of {table.what} has the labels? It has {_list_columns(table)}; "
                "name one"
            )
    return Columns(inputs, label)


def _customary(table: Records, customs: Customs, label: str | None) -> tuple[str, ...]:
    by_lower_name = {name.lower(): name for name in table.columns if name != label}
    for names in sorted(customs.inputs, key=len, reverse=True):  # two texts before one of them
        if all(name in by_lower_name for name in names):
            return tuple(by_lower_name[name] for name in names)
    remaining = [name for name in table.columns if name != label and name.lower() not in customs.label]
    if len(remaining) == 1 and 1 in customs.counts:
        return (remaining[0],)
    count_hint = f", {max(customs.counts)} separated by a comma" if max(customs.counts) > 1 else ""
    raise ValueError(
        f"text-column: which column of {table.what} does the model read? It has {_list_columns(table)}; name "
        f"it{count_hint}"
    )


def _list_columns(table: Records) -> str:
    return ", ".join(table.columns) or "none"
