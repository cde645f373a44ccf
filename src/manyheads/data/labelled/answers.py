"""Extractive question answering: where in a context an answer starts and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval, interval
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.types import Keywords, ModelOutput
from manyheads.data.labelled import metrics as measured
from manyheads.data.labelled.columns import Customs
from manyheads.data.labelled.losses import span_cross_entropy
from manyheads.data.labelled.task import Example, Part, Task, stacked
from manyheads.data.readers.records import Record, is_missing

LONGEST_ANSWER = 30  # tokens


@dataclass(frozen=True)
class Answers:
    """What answers to a question are compared with.

    Attributes
    ----------
    texts: the right ones; empty for a question without an answer.
    context: the text that answers are taken from.
    offsets: where each token starts and ends in it; None for tokens that are not of it.
    """

    texts: tuple[str, ...]
    context: str
    offsets: tuple[tuple[int, int] | None, ...]


class QuestionAnswers(Task):
    """Question answering."""

    kind = "question answering"
    measure = "exact match"
    customs = Customs((("question", "context"), ("query", "passage")), ("answers", "answer"), (2,))
    has_unanswerable = False

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each question whose answer is in what the model can read of its context."""
        if not getattr(self.tokenizer(), "is_fast", False):
            raise ValueError(
                "data: this tokenizer does not say where tokens are in the text; expected a fast one of "
                "transformers"
            )
        examples = []
        rows = self.labelled_rows(records)
        for row in rows:
            example = self._example(row)
            if example is not None:
                examples.append(example)
        self.note_left_out(len(rows) - len(examples), len(rows), "have their answer behind the cut and are")
        if not examples:
            raise ValueError(f"data: no answer of {self.reading.table.what} is in what the model can read")
        self.note_cut()
        return examples

    def _example(self, row: Record) -> Example | None:
        question, context = self.reading.texts(row)
        spans = self._spans(row, context)
        encoded = self.tokens(question, context, cut="only_second", return_offsets_mapping=True)
        offsets = tuple(
            (int(a), int(b)) if part == 1 else None
            for (a, b), part in zip(encoded["offset_mapping"], encoded.sequence_ids(), strict=True)
        )
        target = (0, 0)
        if spans:
            fitting = [
                span for start, text in spans if (span := _token_span(offsets, start, start + len(text)))
            ]
            if not fitting:
                return None
            target = fitting[0]
        else:
            self.has_unanswerable = True
        inputs = self.kept_arguments(encoded)
        truth = Answers(tuple(text for _, text in spans), context, offsets)
        return Example(inputs, target, truth, len(offsets), spans[0][1] if spans else "(no answer)")

    def _spans(self, row: Record, context: str) -> list[tuple[int, str]]:
        """The right answers: where they start, and their text."""
        what, value = self.reading.table.what, self.reading.cell(row).value
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(ValueError):
                value = json.loads(value)
        if isinstance(value, Mapping):
            texts, starts = value.get("text", []), value.get("answer_start", value.get("start"))
            texts = [texts] if isinstance(texts, str) else list(texts)
            starts = (
                [None] * len(texts) if starts is None else [starts] if isinstance(starts, int) else starts
            )
        else:
            texts = [str(text) for text in (value if isinstance(value, list | tuple) else [value])]
            start = row.values.get("answer_start") if len(texts) == 1 else None
            starts = [None if is_missing(start) else int(float(str(start)))] * len(texts)
        spans = []
        for text, start in zip(texts, starts, strict=True):
            at = context.find(text) if start is None else int(start)
            if not text or at < 0 or context[at : at + len(text)] != text:
                raise ValueError(
                    f"data: {row.where} of {what} has the answer {text[:60]!r}, which is not in its context"
                    f"{'' if start is None else f' at character {start}'}; expected a part of the context"
                )
            spans.append((at, text))
        return spans

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Padded ids, and where answers start and end, (batch,) each."""
        starts, ends = (torch.tensor([example.target[side] for example in examples]) for side in (0, 1))
        return {**self.padded_inputs(examples), "start_positions": starts, "end_positions": ends}

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """Cross-entropy of start and end."""
        start, end = result["start_logits"], result["end_logits"]
        if "attention_mask" in batch:  # padding is no answer
            padding = batch["attention_mask"] == 0
            start, end = (x.masked_fill(padding, torch.finfo(x.dtype).min) for x in (start, end))
        return span_cross_entropy(start, end, batch["start_positions"], batch["end_positions"])

    def answer(self, start: Tensor, end: Tensor, answers: Answers) -> str:
        """The likeliest answer, from logits (tokens,): a part of the context; "" where none is likelier."""
        inside = torch.tensor([offset is not None for offset in answers.offsets], device=start.device)
        a, b = (x[: len(inside)].float().masked_fill(~inside, -torch.inf) for x in (start, end))
        both = a.unsqueeze(1) + b.unsqueeze(0)  # (starts, ends)
        allowed = torch.ones_like(both, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
        both = both.masked_fill(~allowed, -torch.inf)
        best = int(both.argmax())
        if self.has_unanswerable and float(start[0] + end[0]) > float(both.max()):
            return ""
        first, last = (answers.offsets[i] for i in divmod(best, len(inside)))
        return answers.context[first[0] : last[1]] if first and last else ""

    def predictions(self, result: ModelOutput, batch: LabelledBatch) -> list[tuple[str, Answers]]:
        """The answer to each question of a batch, and the right ones."""
        rows = zip(result["start_logits"], result["end_logits"], batch.examples, strict=True)
        return [(self.answer(start, end, one.truth), one.truth) for start, end, one in rows]

    def scores(self, result: object, batch: LabelledBatch) -> Tensor:
        """Whether the answer is exactly one of the right ones."""
        return stacked(torch.tensor([exact(*pair) for pair in self.predictions(result, batch)]))

    def parts(self, model: nn.Module, result: object, batch: LabelledBatch) -> list[Part]:
        """(exact, f1, loss)."""
        losses = self.loss(result, batch).tolist()
        pairs = zip(self.predictions(result, batch), losses, strict=True)
        return [(exact(*pair), best_f1(*pair), loss) for pair, loss in pairs]

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Exact match, F1 of words, loss."""
        matches, scores, losses = zip(*parts, strict=True)
        return {
            "exact_match": measured.share(matches),
            "f1": measured.ratio(scores, [1.0] * len(scores)),
            "loss": interval(losses),
        }


def _token_span(offsets: Sequence[tuple[int, int] | None], start: int, end: int) -> tuple[int, int] | None:
    """The first and last token of a part of the context; None if some of it was cut off."""
    covered = [
        i for i, offset in enumerate(offsets) if offset is not None and offset[0] < end and offset[1] > start
    ]
    real_offsets = [offset for offset in offsets if offset is not None]
    if not covered or not real_offsets or real_offsets[-1][1] < end:
        return None
    return covered[0], covered[-1]


def exact(prediction: str, answers: Answers) -> bool:
    """Whether an answer is one of the right ones, as SQuAD compares them.

    >>> exact("The tower.", Answers(("tower",), "", ()))
    True
    """
    return measured.plain_answer(prediction) in map(measured.plain_answer, answers.texts or ("",))


def best_f1(prediction: str, answers: Answers) -> float:
    """The largest F1 of an answer with one of the right ones."""
    return max(measured.answer_f1(prediction, text) for text in answers.texts or ("",))
