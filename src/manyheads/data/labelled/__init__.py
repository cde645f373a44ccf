"""Rows with labels as batches for a model with a task head, with the loss and the metrics of its task.

The task is read off the model's class (`manyheads.models.task_head`). Each kind of head has a class here: how
rows become batches, the loss of each sequence, what is measured.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of, to_device
from manyheads.common.interrupts import interrupted
from manyheads.common.intervals import Interval
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run
from manyheads.common.types import Keywords, ModelOutput
from manyheads.data.batches import BATCH_TOKENS, Corpus, bucketed, groups, unknown_share
from manyheads.data.labelled.answers import QuestionAnswers
from manyheads.data.labelled.columns import choose_columns
from manyheads.data.labelled.language import HiddenTokens, NextTokens, WrittenTexts
from manyheads.data.labelled.media import HeardLetters, HeardTexts, ImageClasses, SoundClasses
from manyheads.data.labelled.task import Example, Part, Reading, Task
from manyheads.data.labelled.texts import TextClasses, WordLabels, text_classes
from manyheads.data.readers.records import read_records
from manyheads.models.loaded import Loaded, if_any
from manyheads.models.task_head import TaskKind, kinds, task_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from manyheads.data.labelled.columns import Customs

# For each kind of head: its customary columns, and how its task is made.
_TASKS: Mapping[TaskKind, tuple[Customs, Callable[[Reading], Task]]] = {
    "sequence-classification": (TextClasses.customs, text_classes),
    "token-classification": (WordLabels.customs, WordLabels),
    "question-answering": (QuestionAnswers.customs, QuestionAnswers),
    "seq2seq": (WrittenTexts.customs, WrittenTexts),
    "causal-lm": (NextTokens.customs, NextTokens),
    "masked-lm": (HiddenTokens.customs, HiddenTokens),
    "image-classification": (ImageClasses.customs, ImageClasses),
    "audio-classification": (SoundClasses.customs, SoundClasses),
    "ctc": (HeardLetters.customs, HeardLetters),
    "speech-seq2seq": (HeardTexts.customs, HeardTexts),
}


@dataclass
class Labelled(Corpus):
    """Rows with labels, as a model reads them. Made by `labelled`.

    Iterating gives batches, each with its labels: dicts for `importance`, `prune`, `compare`, `inspect`,
    `roles` and `diversity`. It is a corpus, too, for the commands.

    Attributes
    ----------
    task: what the labels are for: ``task.kind``, ``task.measure``.
    examples: the rows.
    """

    task: Task = field(default=None, repr=False)  # type: ignore[assignment]
    examples: list[Example] = field(default_factory=list, repr=False)

    def __iter__(self) -> Iterator[LabelledBatch]:
        for indices in self.plan():
            yield self.task.batch([self.examples[i] for i in indices])

    def __len__(self) -> int:
        return len(self.plan())

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """The loss of the task, one number for each sequence, from what the model returned and the batch."""
        return self.task.loss(result, batch)

    def buckets(
        self, indices: Sequence[int] | None = None, batch_tokens: int | None = None
    ) -> list[list[int]]:
        """Batches of similar lengths; examples that the model cannot tell from their padding stay apart."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in range(len(self.sizes)) if indices is None else indices:
            groups.setdefault(self.examples[i].group, []).append(i)
        token_limit = batch_tokens or self.batch_tokens
        return [
            [members[n] for n in part]
            for members in groups.values()
            for part in bucketed([self.sizes[i] for i in members], token_limit, self.padding)
        ]

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of the results should know."""
        return [*self.task.notes, *super().notes]

    @property
    def reading(self) -> str:
        """What is read as what, in a sentence."""
        rows = f"{len(self.examples):,} {'row' if len(self.examples) == 1 else 'rows'}"
        return f"{self.what}: {self.task.kind}, {rows}, {self.task.reading.columns}"

    def label(self, index: int) -> str:
        """The label of an example for people; "" where the input itself is what is predicted."""
        return self.examples[index].shown

    def part(self, indices: Sequence[int]) -> Labelled:
        """Some of the examples."""
        chosen = [self.examples[i] for i in indices]
        return replace(
            self,
            sizes=[example.size for example in chosen],
            make=lambda some: self.task.batch([chosen[i] for i in some]),
            examples=chosen,
        )

    def evaluate(self, model: nn.Module, progress: Progress = no_progress) -> Measured:
        """The metrics of the task, with 95% intervals over the rows.

        Ctrl-C ends it after the current batch, with the metrics of the rows so far.
        """
        device, done = device_of(model), 0
        parts: list[Part] = []
        with torch.no_grad(), evaluating(model):
            for batch in self:
                if interrupted() and parts:
                    break
                batch = to_device(batch, device)
                parts += self.task.parts(model, run(model, batch), batch)
                done += len(batch.examples)
                progress("evaluate", done, len(self.examples))
        return Measured(self.task.metrics(parts), done)


@dataclass(frozen=True)
class Measured:
    """Metrics with their intervals, and how many rows they are of."""

    metrics: dict[str, Interval]
    rows: int


def labelled(
    data: str | Path,
    model: nn.Module | Loaded,
    tokenizer: object = None,
    *,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Labelled:
    """Your rows with labels, as batches for a model with a task head.

    The task is read from the model: sequence classification (of one text or two; regression; several
    classes), token classification, question answering, causal and masked language models, encoder-decoders,
    image and audio classification, speech recognition.

    Parameters
    ----------
    data: a .csv, .tsv, .jsonl or .parquet file; a folder with a folder for each class of images or sounds; or
        the name of a dataset, ``owner/name`` or ``owner/name:config``.
    model: a model of transformers with its task head, or what ``open_model(name, head=True)`` returned.
    tokenizer: the model's tokenizer; its image processor, for images; its feature extractor, or a processor
        that has both, for sounds. Not needed with what `open_model` returned.
    text: the column that the model reads; two names for two texts, or for question and context. Default:
        common names, such as text, sentence, sentence1 and sentence2, tokens, question and context,
        source, image, audio.
    label: the column with the labels. Default: label, ner_tags, answers, target, transcription and the like.
        Classes are matched with ``model.config.id2label``, all by name or all by number.
    split: which part of a dataset, or of a file with a column ``split``.
    limit: read at most this many rows, evenly over all.
    max_length: truncate longer texts to this many tokens.
    batch_tokens: the largest number of tokens in a batch, padding included.

    Returns
    -------
    Labelled
        Iterate it for batches with labels; ``data.loss`` is the loss of the task, ``data.evaluate(model)``
        its metrics with intervals, ``data.notes`` what was truncated or left out, ``data.reading`` which
        column was read as what.

    See Also
    --------
    importance : with labels, the methods that take a loss take the task's.
    card, prune : quality is the task's.
    evaluate : the metrics of a model that is in a folder.

    References
    ----------
    Rajpurkar et al. 2016, SQuAD: 100,000+ questions for machine comprehension of text (exact match and F1).
    Tjong Kim Sang and De Meulder 2003, Introduction to the CoNLL-2003 shared task (F1 of entities).
    Post 2018, A call for clarity in reporting BLEU scores.
    Wilson 1927, Probable inference, the law of succession, and statistical inference (intervals of shares).
    Efron 1979, Bootstrap methods: another look at the jackknife (intervals of the other metrics).

    Examples
    --------
    >>> import tempfile
    >>> from transformers import BertForSequenceClassification
    >>> import manyheads as mh
    >>> encoder = mh.open_model()
    >>> _ = torch.manual_seed(0)
    >>> config = encoder.model.config
    >>> config.id2label = {0: "bad", 1: "good"}
    >>> model = BertForSequenceClassification(config).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = Path(folder, "reviews.csv")
    ...     _ = rows.write_text("review,stars\\nA fine film.,good\\nNo.,bad\\nI left.,bad\\n")
    ...     data = mh.labelled(rows, model, encoder.tokenizer(), text="review", label="stars")
    >>> data.task.kind, len(data.examples), data.label(0)
    ('sequence classification', 3, 'good')
    >>> sorted(data.evaluate(model).metrics)
    ['accuracy', 'f1_macro', 'loss']
    """
    loaded = model if isinstance(model, Loaded) else _loaded(model, tokenizer)
    kind = task_kind(loaded.model)
    if kind is None:
        raise ValueError(
            f"data: {loaded.name} ({type(loaded.model).__name__}) has no task head whose labels can be "
            f"read; expected a model of transformers for one of {', '.join(kinds())}, loaded with its head"
        )
    for name, number in (("limit", limit), ("max-length", max_length), ("batch-tokens", batch_tokens)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: got {number}; expected 1 or more")
    customs, make_task = _TASKS[kind]
    table = read_records(str(data), split, limit)
    columns = choose_columns(table, customs, text, label)
    length = loaded.longest(max_length, if_any(loaded.tokenizer))
    task = make_task(Reading(loaded, table, columns, length))
    examples = task.encode(table.rows)
    # the first ones are a fair sample of rows that are sorted by label
    random.Random(0).shuffle(examples)
    return _corpus(loaded, table.what, task, examples, batch_tokens)


def _corpus(loaded: Loaded, what: str, task: Task, examples: list[Example], batch_tokens: int) -> Labelled:
    corpus = Labelled(
        what,
        task.unit,
        [example.size for example in examples],
        lambda some: task.batch([examples[i] for i in some]),
        batch_tokens,
        task.unit != "tokens" or loaded.takes_mask,
        task=task,
        examples=examples,
    )
    if task.unit == "tokens":
        counts = Counter(token for example in examples for token in example.inputs["input_ids"])
        tokenizer = task.tokenizer()
        vocabulary = loaded.vocabulary
        if vocabulary is not None and max(counts) >= vocabulary:
            raise ValueError(
                f"data: the tokenizer gives the id {max(counts)}; expected 0 to {vocabulary - 1}, the "
                "model's vocabulary: take the tokenizer that belongs to the model"
            )
        corpus.groups, corpus.shares = groups(counts, tokenizer.all_special_ids)
        corpus.unknown = unknown_share(counts, tokenizer)
    return corpus


def _loaded(model: nn.Module, reader: Any) -> Loaded:
    """A model and what makes its input: a tokenizer, an image processor, a feature extractor, or several."""

    def missing() -> NoReturn:
        raise ValueError(
            f"tokenizer: {type(model).__name__} needs the one that makes its input; expected "
            "labelled(data, model, tokenizer), or the image processor or feature extractor in its place"
        )

    def part(name: str) -> Callable[[], Any]:
        return lambda: missing() if reader is None else getattr(reader, name, reader)

    return Loaded(
        type(model).__name__,
        model,
        part("tokenizer"),
        part("image_processor"),
        extractor=part("feature_extractor"),
    )
