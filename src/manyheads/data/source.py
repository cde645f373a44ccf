"""A model and the corpus it reads: the options that commands share. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads import data, models
from manyheads.common.processes import processes
from manyheads.data.labelled_options import LabelledOptions
from manyheads.models.opening import Opening

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.models.loaded import Loaded

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a hub name, or package.module:factory; the embedded MiniLM by default."),
]
Text = Annotated[
    str | None,
    "A text file, one text per line, or a pattern of files; FILE.jsonl, FILE.parquet or the name of a "
    "dataset with --column; - for standard input; an embedded text by default.",
    "Corpus",
]
TextColumn = Annotated[
    str | None, "The column of --text that is read; text, sentence, review ... by default.", "Corpus"
]
Images = Annotated[str | None, "A folder of images.", "Corpus"]
Tokens = Annotated[str | None, "Token ids in a NumPy file: (sequences, length) or (length,).", "Corpus"]
MaxLength = Annotated[
    int | None, "Cut longer sequences into pieces of this length; rows with labels, to this length.", "Corpus"
]
Limit = Annotated[int | None, "Read at most this many texts, images, rows or sequences.", "Corpus"]
Sample = Annotated[
    int, "Measure on a random sample of the corpus with at most this many tokens; 0 for all of it.", "Corpus"
]
BatchTokens = Annotated[int, "The number of tokens in a batch, padding included.", "Corpus"]


@dataclass(frozen=True)
class Source(Opening, LabelledOptions):
    """A model and the corpus it reads: a parameter of this type stands for all these options.

    >>> loaded, corpus = Source(limit=5).open()
    >>> loaded.name, len(corpus.sizes)
    ('MiniLM', 5)
    """

    model: Model = None
    text: Text = None
    column: TextColumn = None
    images: Images = None
    tokens: Tokens = None
    max_length: MaxLength = None
    limit: Limit = None
    batch_tokens: BatchTokens = 4096

    def open(self, *, labels: bool = False, sample: int = 0) -> tuple[Loaded, Corpus]:
        """The model with its head, and its corpus, or a sample of it with at most ``sample`` tokens.

        ``labels`` is as for `corpus.choose`.
        """
        if sample < 0:
            raise ValueError(f"sample: got {sample}; expected a number of tokens, 0 for all of them")
        if self.text == "-" and processes() > 1:
            raise ValueError("text: several processes cannot share standard input; save the text to a file")
        loaded = models.open.open_model(self.model, head=True, **self.how)
        corpus = data.corpus.choose(
            loaded, self.text, self.images, self.tokens, self.max_length, self.limit, self.batch_tokens,
            self.data, labels=labels, text_column=self.text_column, label_column=self.label_column,
            split=self.split, column_of_text=self.column, sample=sample,
        )  # fmt: skip
        return loaded, corpus.sampled(sample)
