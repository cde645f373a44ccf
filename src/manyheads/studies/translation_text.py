"""The sentence pairs that studies train on: the embedded ones, or the user's."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer

from manyheads.tasks.translation import Translation
from manyheads.training.task import Data


def opened(data: str | None = None, **options: Any) -> tuple[Any, Data]:
    """A translation task of our own with these options, and its data, which are read once.

    >>> task, data = opened(heads=2)
    >>> task.heads, opened()[0].heads, len(data.valid)
    (2, 4, 300)
    """
    task = Translation(**options)
    # Learned positions are a table of this length: with them, longer sentences are left out, so that all
    # position encodings are compared on the same ones.
    tokenizer, examples = _read(data, task.vocabulary, task.max_tokens)
    task.tokenizer = tokenizer
    return task, examples


@cache
def _read(data: str | None, vocabulary: int, max_tokens: int) -> tuple[Tokenizer, Data]:
    task = Translation(vocabulary=vocabulary, max_tokens=max_tokens, positions="learned")
    examples = task.open(data)
    return task.tokenizer, examples
