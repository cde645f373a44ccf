"""What all tasks share: an example, how texts become tokens, and what a task has to define."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.types import Keywords, ModelOutput
from manyheads.data.batches import padded
from manyheads.data.labelled.class_labels import Cell
from manyheads.data.labelled.columns import Columns, Customs
from manyheads.data.readers.records import Record, Records, is_missing
from manyheads.models.loaded import Loaded
from manyheads.models.task_head import class_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A part of a metric: what one example adds to it.
Part = Any


@dataclass(eq=False)
class Example:
    """One row, as the model reads it.

    Attributes
    ----------
    inputs: token ids by the name of the model's argument; the file of an image or sound as ``file``.
    target: what its labels are made from.
    truth: what answers are compared with.
    size: the number of tokens.
    shown: its label for people; "" where the input itself is what is predicted.
    group: examples share a batch only if theirs are equal.
    """

    inputs: Keywords
    target: Any
    truth: Any
    size: int
    shown: str = ""
    group: tuple[int, ...] = ()


@dataclass(eq=False)
class Reading:
    """What a task reads its examples with.

    Attributes
    ----------
    loaded: the model, and what makes its input.
    table: the rows.
    columns: which columns are read.
    length: the most tokens of a sequence; None without a limit.
    """

    loaded: Loaded
    table: Records
    columns: Columns
    length: int | None = None

    def texts(self, record: Record) -> list[str]:
        """What the model reads of a row."""
        cells = [record.values[name] for name in self.columns.inputs]
        return ["" if is_missing(cell) else str(cell) for cell in cells]

    def cell(self, record: Record) -> Cell:
        """The label of a row."""
        return Cell(record.where, None if self.columns.label is None else record.values[self.columns.label])


class Task(ABC):
    """A kind of head: how rows become batches, the loss, the scores and the metrics.

    Attributes
    ----------
    kind: what it is called.
    customs: the customary names of its columns.
    measure: what `scores` are.
    unit: what is counted: ``tokens``, ``images`` or ``sounds``.
    notes: what a reader has to know about the rows.
    """

    kind: ClassVar[str]
    customs: ClassVar[Customs]
    unit: ClassVar[str] = "tokens"
    measure: str

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.names = class_names(reading.loaded.model)
        self.notes: list[str] = []
        self._arguments = set(inspect.signature(reading.loaded.model.forward).parameters)
        self._cut = self._read = 0
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @abstractmethod
    def encode(self, records: Sequence[Record]) -> list[Example]:
        """The examples of some rows; rows without a label are left out, with a note."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> Keywords:
        """The arguments of the model, and the labels."""

    @abstractmethod
    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """The loss of each sequence, (batch,)."""

    @abstractmethod
    def scores(self, result: object, batch: LabelledBatch) -> Tensor:
        """The score of each sequence and its weight, (batch, 2) in float64."""

    @abstractmethod
    def parts(self, model: nn.Module, result: object, batch: LabelledBatch) -> list[Part]:
        """What each example of a batch adds to the metrics."""

    @abstractmethod
    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """The metrics of all examples."""

    @property
    def config(self) -> object:
        """The config of the model."""
        return getattr(self.reading.loaded.model, "config", None)

    def batch(self, examples: Sequence[Example]) -> LabelledBatch:
        """Examples as a batch."""
        return LabelledBatch(self.collate(examples), self, list(examples))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, which must be one of transformers."""
        if self._tokenizer is not None:
            return self._tokenizer
        tokenizer = self.reading.loaded.tokenizer()
        if not hasattr(tokenizer, "all_special_ids"):
            raise ValueError(
                "data: expected a tokenizer of transformers for labelled texts, got "
                f"{type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        return tokenizer

    def labelled_rows(self, records: Sequence[Record]) -> list[Record]:
        """The rows that have a label; the others are noted."""
        if self.reading.columns.label is None:
            return list(records)
        kept = [row for row in records if not is_missing(self.reading.cell(row).value)]
        self.note_left_out(len(records) - len(kept), len(records), "have no label and are")
        if not kept:
            raise ValueError(
                f"data: no row of {self.reading.table.what} has a label in the column "
                f"{self.reading.columns.label!r}; expected at least one"
            )
        return kept

    def note_left_out(self, rows: int, total: int, why: str) -> None:
        """Note how many rows are left out, if any."""
        if rows:
            self.notes.append(f"{rows:,} of {total:,} rows ({rows / total:.1%}) {why} left out")

    def note_cut(self) -> None:
        """Note how many texts were longer than the model's length."""
        if self._cut:
            self.notes.append(
                f"{self._cut:,} of {self._read:,} rows ({self._cut / self._read:.1%}) are longer than "
                f"{self.reading.length:,} tokens and were cut to that length"
            )

    def tokens(self, *texts: Any, cut: str | bool = True, **options: Any) -> Any:
        """Texts as the tokenizer encodes them, cut to the longest length; counts those that were cut."""
        tokenizer, length = self.tokenizer(), self.reading.length
        encoded = tokenizer(*texts, verbose=False, **options)
        self._read += 1
        if length is not None and len(encoded["input_ids"]) > length:
            self._cut += 1
            encoded = tokenizer(*texts, truncation=cut, max_length=length, verbose=False, **options)
        if not len(encoded["input_ids"]):
            raise ValueError(f"data: a text of {self.reading.table.what} gives no token; expected some words")
        return encoded

    def kept_arguments(self, encoded: Any) -> dict[str, list[int]]:
        """The ids and segments of an encoded text that the model takes."""
        names = [name for name in ("input_ids", "token_type_ids") if name in self._arguments]
        return {name: list(encoded[name]) for name in names if name in encoded}

    def padded_inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Token ids of several examples, padded, with a mask if the model takes one."""
        batch: dict[str, Tensor] = {}
        for name in examples[0].inputs:
            rows = [example.inputs[name] for example in examples]
            batch[name], real = padded(rows, self.padding if name == "input_ids" else 0)
        if "attention_mask" in self._arguments:
            batch["attention_mask"] = real
        return batch

    @property
    def padding(self) -> int:
        """The id that fills up short sequences."""
        candidates = (
            getattr(self.config, "pad_token_id", None),
            getattr(self.tokenizer(), "pad_token_id", None),
        )
        vocabulary = self.reading.loaded.vocabulary
        fitting = (n for n in candidates if isinstance(n, int) and 0 <= n < (vocabulary or n + 1))
        return next(fitting, 0)


def stacked(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Scores and their weights as (batch, 2) in float64; weights of one by default.

    >>> stacked(torch.tensor([True, False])).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    ones = torch.ones(len(values), dtype=torch.float64) if weights is None else weights.double().cpu()
    return torch.stack([values.double().cpu(), ones], 1)


def label_counts(labels: Tensor) -> Tensor:
    """How many labels each sequence has, (batch,)."""
    return (labels >= 0).sum(1)
