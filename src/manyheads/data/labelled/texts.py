"""Texts with labels: classes, amounts, or several classes of a text (or two); labels of words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval, interval
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.types import Keywords, ModelOutput
from manyheads.data.batches import padded
from manyheads.data.labelled import metrics as measured
from manyheads.data.labelled.class_labels import Cell, list_of, match_classes, number_of
from manyheads.data.labelled.columns import Customs
from manyheads.data.labelled.losses import IGNORED, several_classes, squared_error, token_cross_entropy
from manyheads.data.labelled.task import Example, Part, Reading, Task, label_counts, stacked
from manyheads.data.readers.records import Record

TEXTS = ("text", "sentence", "review", "content", "tweet", "comment", "document", "title")
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("question", "sentence"),
    ("query", "passage"),
)
LABELS = ("label", "labels", "class", "category", "target", "score", "stars", "sentiment")
BY_TEXT = (*PAIRS, *((name,) for name in TEXTS))


class Classes(Task):
    """What is common to tasks in which an input as a whole has a class."""

    kind = "classification"
    measure = "accuracy"

    def classes(self, rows: Sequence[Record]) -> list[int]:
        """The class of each row."""
        label, table = self.reading.columns.label or "", self.reading.table
        cells = [self.reading.cell(row) for row in rows]
        matched = match_classes(cells, self.names, table.what, table.class_names.get(label))
        shown = ", ".join(f"{n} {name}" for n, name in list(self.names.items())[:8])
        more = ", ..." if len(self.names) > 8 else ""
        self.notes.append(f"labels are {matched.by} of classes ({shown}{more})")
        return matched.classes

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """Cross-entropy of the class."""
        return token_cross_entropy(result["logits"].unsqueeze(1), batch["labels"].reshape(-1, 1))

    def scores(self, result: ModelOutput, batch: LabelledBatch) -> Tensor:
        """Whether the likeliest class is right."""
        return stacked(result["logits"].argmax(-1) == batch["labels"])

    def parts(self, model: nn.Module, result: ModelOutput, batch: LabelledBatch) -> list[Part]:
        """(truth, prediction, loss)."""
        columns = batch["labels"], result["logits"].argmax(-1), self.loss(result, batch)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Accuracy, macro F1, loss."""
        truths, predictions, losses = zip(*parts, strict=True)
        return {
            "accuracy": measured.share([a == b for a, b in zip(truths, predictions, strict=True)]),
            "f1_macro": measured.macro_f1(truths, predictions),
            "loss": interval(losses),
        }


class TextClasses(Classes):
    """Sequence classification."""

    kind = "sequence classification"
    customs = Customs(BY_TEXT, LABELS, (1, 2))

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each row."""
        rows = self.labelled_rows(records)
        examples = [self._example(row, *target) for row, target in zip(rows, self.targets(rows), strict=True)]
        if (
            getattr(self.config, "pad_token_id", None) is None
        ):  # such a model cannot find the end of padded texts
            for number, example in enumerate(examples):
                example.group = (number,)
        self.note_cut()
        return examples

    def targets(self, rows: Sequence[Record]) -> list[tuple[object, str]]:
        """The label of each row, and how it is shown."""
        return [(number, self.names[number]) for number in self.classes(rows)]

    def _example(self, row: Record, target: object, shown: str) -> Example:
        inputs = self.kept_arguments(self.tokens(*self.reading.texts(row)))
        return Example(inputs, target, target, len(inputs["input_ids"]), shown)

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Padded ids and (batch,) classes."""
        labels = torch.tensor([example.target for example in examples])
        return {**self.padded_inputs(examples), "labels": labels}


class TextAmounts(TextClasses):
    """Regression: one number, or several, for each text."""

    kind = "regression"
    measure = "squared error"

    def targets(self, rows: Sequence[Record]) -> list[tuple[object, str]]:
        """The numbers of each row."""
        targets: list[tuple[object, str]] = []
        for row in rows:
            cell = self.reading.cell(row)
            cells = list_of(cell.value) if len(self.names) > 1 else [cell.value]
            if len(cells) != len(self.names):
                raise ValueError(
                    f"data: {row.where} of {self.reading.table.what} has {len(cells)} numbers as its "
                    f"label; expected {len(self.names)}, as many as the model has outputs"
                )
            numbers = [number_of(Cell(row.where, value), self.reading.table.what) for value in cells]
            targets.append((numbers, ", ".join(f"{number:g}" for number in numbers)))
        return targets

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Padded ids and (batch,) or (batch, outputs) numbers."""
        labels = torch.tensor([example.target for example in examples])
        return {
            **self.padded_inputs(examples),
            "labels": labels.squeeze(1) if labels.shape[1] == 1 else labels,
        }

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """The squared error."""
        return squared_error(result["logits"], batch["labels"])

    def scores(self, result: object, batch: LabelledBatch) -> Tensor:
        """The squared error."""
        return stacked(self.loss(result, batch))

    def parts(self, model: nn.Module, result: ModelOutput, batch: LabelledBatch) -> list[Part]:
        """(true numbers, predicted numbers, loss)."""
        truths = batch["labels"].reshape(len(batch["labels"]), -1).tolist()
        return list(zip(truths, result["logits"].tolist(), self.loss(result, batch).tolist(), strict=True))

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Mean squared error and correlations (over all numbers, where there are several)."""
        truths, predictions, losses = zip(*parts, strict=True)
        flat = [x for row in truths for x in row], [x for row in predictions for x in row]
        return {
            "mean_squared_error": interval(losses),
            "pearson": measured.correlation(*flat, ranks=False),
            "spearman": measured.correlation(*flat, ranks=True),
        }


class SeveralClasses(TextClasses):
    """Multi-label classification: several classes may be right for a text."""

    kind = "multi-label classification"

    def targets(self, rows: Sequence[Record]) -> list[tuple[object, str]]:
        """Ones and zeros, one for each class."""
        label, table = self.reading.columns.label or "", self.reading.table
        lists = [list_of(self.reading.cell(row).value) for row in rows]
        switches = all(len(one) == len(self.names) and {str(x) for x in one} <= _SWITCHES for one in lists)
        targets: list[tuple[object, str]] = []
        for row, values in zip(rows, lists, strict=True):
            if switches:
                chosen = [n for n, value in enumerate(values) if float(str(value)) > 0]
            else:
                cells = [Cell(row.where, value) for value in values]
                chosen = match_classes(cells, self.names, table.what, table.class_names.get(label)).classes
            ones = [float(n in chosen) for n in range(len(self.names))]
            targets.append((ones, ", ".join(self.names[n] for n in chosen) or "–"))
        return targets

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """Binary cross-entropy of every class."""
        return several_classes(result["logits"], batch["labels"])

    def scores(self, result: ModelOutput, batch: LabelledBatch) -> Tensor:
        """Whether all classes of a text are right."""
        return stacked(((result["logits"] > 0) == (batch["labels"] > 0.5)).all(-1))

    def parts(self, model: nn.Module, result: ModelOutput, batch: LabelledBatch) -> list[Part]:
        """(true switches, predicted switches, loss)."""
        columns = batch["labels"] > 0.5, result["logits"] > 0, self.loss(result, batch)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Accuracy (all classes right), F1."""
        truths, predictions, losses = zip(*parts, strict=True)
        true, predicted = np.array(truths, int), np.array(predictions, int)
        return {
            "accuracy": measured.share((true == predicted).all(1).tolist()),
            "f1_micro": measured.several_f1(true, predicted, "micro"),
            "f1_macro": measured.several_f1(true, predicted, "macro"),
            "loss": interval(losses),
        }


_SWITCHES = {"0", "1", "0.0", "1.0"}


def text_classes(reading: Reading) -> Task:
    """The task of a model for sequence classification, which may be regression or have several classes."""
    config = reading.loaded.model.config
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return SeveralClasses(reading)
    amounts = problem == "regression" or (problem is None and len(getattr(config, "id2label", {})) == 1)
    return TextAmounts(reading) if amounts else TextClasses(reading)


class WordLabels(Task):
    """Token classification: every word has a label, which its first token gets."""

    kind = "token classification"
    measure = "accuracy"
    customs = Customs(
        (("tokens",), ("words",), ("text",), ("sentence",)),
        ("ner_tags", "pos_tags", "chunk_tags", "tags", *LABELS),
    )

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each row: its words through the tokenizer."""
        if not getattr(self.tokenizer(), "is_fast", False):
            raise ValueError(
                "data: this tokenizer does not say which word each token belongs to; expected a fast one of "
                "transformers"
            )
        rows = self.labelled_rows(records)
        label, what = self.reading.columns.label or "", self.reading.table.what
        words = [
            [str(word) for word in list_of(row.values[self.reading.columns.inputs[0]], None)] for row in rows
        ]
        tags = [list_of(self.reading.cell(row).value, None) for row in rows]
        for row, sentence_words, labels in zip(rows, words, tags, strict=True):
            if len(sentence_words) != len(labels):
                raise ValueError(
                    f"data: {row.where} of {what} has {len(sentence_words)} words and {len(labels)} labels; "
                    "expected one for each"
                )
        cells = [Cell(row.where, tag) for row, labels in zip(rows, tags, strict=True) for tag in labels]
        matched = match_classes(cells, self.names, what, self.reading.table.class_names.get(label))
        classes = iter(matched.classes)
        examples = [
            self._example(sentence_words, [next(classes) for _ in sentence_words]) for sentence_words in words
        ]
        lost = sum(example.truth[0] for example in examples)
        if lost:
            total = len(matched.classes)
            self.notes.append(f"{lost:,} of {total:,} labelled words ({lost / total:.1%}) were cut off")
        self.note_cut()
        return examples

    def _example(self, words: list[str], classes: list[int]) -> Example:
        encoded = self.tokens(words, is_split_into_words=True)
        inputs = self.kept_arguments(encoded)
        target, before = [], None
        for word in encoded.word_ids():
            target.append(classes[word] if word is not None and word != before else IGNORED)
            before = word
        lost = len(classes) - sum(label != IGNORED for label in target)
        shown = [
            f"{word}/{self.names[n]}" for word, n in zip(words, classes, strict=True) if self.names[n] != "O"
        ]
        return Example(inputs, target, (lost,), len(target), " ".join(shown))

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Padded ids and (batch, length) classes, -100 except at the first token of a word."""
        labels = padded([example.target for example in examples], IGNORED)[0]
        return {**self.padded_inputs(examples), "labels": labels}

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """Cross-entropy of the words' classes."""
        return token_cross_entropy(result["logits"], batch["labels"])

    def scores(self, result: ModelOutput, batch: LabelledBatch) -> Tensor:
        """The share of words whose class is right, weighted by words."""
        count = label_counts(batch["labels"])
        right = ((result["logits"].argmax(-1) == batch["labels"]) & (batch["labels"] >= 0)).sum(1)
        return stacked(right / count.clamp(min=1), count)

    def parts(self, model: nn.Module, result: ModelOutput, batch: LabelledBatch) -> list[Part]:
        """(true classes, predicted classes, loss) of the words of each sentence."""
        losses = self.loss(result, batch).tolist()
        rows = zip(batch["labels"], result["logits"].argmax(-1), losses, strict=True)
        return [
            (true[true >= 0].tolist(), predicted[true >= 0].tolist(), loss) for true, predicted, loss in rows
        ]

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Accuracy of words; F1 of entities where labels are B- and I-, else the macro F1 of words."""
        right = [sum(map(int.__eq__, true, predicted)) for true, predicted, _ in parts]
        results = {"accuracy": measured.ratio(right, [len(true) for true, _, _ in parts])}
        if any(name.startswith(("B-", "I-")) for name in self.names.values()):
            counts = []
            for true, predicted, _ in parts:
                a, b = (measured.entities([self.names[n] for n in side]) for side in (true, predicted))
                counts.append((len(a & b), len(b), len(a)))
            results["f1_entities"] = measured.f1_of_counts(counts)
        else:
            flat = ([n for part in parts for n in part[side]] for side in (0, 1))
            results["f1_macro"] = measured.macro_f1(*flat)
        return results | {"loss": interval(loss for _, _, loss in parts)}
