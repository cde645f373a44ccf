"""Which rows and columns of labelled data are read: the options that commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class LabelledOptions:
    """Data with labels, and their columns. The text beside each type is the help of its option.

    >>> LabelledOptions(data="reviews.csv", label_column="stars").text_column is None
    True
    """

    data: Annotated[
        str | None,
        "Rows with labels for a model with a task head: FILE.csv, .tsv, .jsonl or .parquet, a folder with a "
        "folder for each class, or the name of a dataset. For a model that train wrote: data of its task; "
        "what was held out by default.",
        "Corpus",
    ] = None
    text_column: Annotated[
        str | None,
        "The column of --data that the model reads, or two, separated by a comma; text, sentence1,sentence2, "
        "tokens, question,context, image ... by default.",
        "Corpus",
    ] = None
    label_column: Annotated[
        str | None, "The column of --data with labels; label, tags, answers, target ... by default.", "Corpus"
    ] = None
    split: Annotated[
        str | None,
        "Which part of --data, or of a dataset in --text; validation, test or train by default.",
        "Corpus",
    ] = None
