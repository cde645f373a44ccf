"""The text that most studies train on: the embedded one, or the user's."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer

from manyheads.tasks.language import Language
from manyheads.training.task import Data


def opened(data: str | None, context: int) -> tuple[Any, Data]:
    """A language task of our own to set options of, and its data, which are read once.

    >>> task, data = opened(None, context=16)
    >>> task.heads = 2
    >>> opened(None, context=16)[0].heads
    4
    """
    tokenizer, examples = _read(data, context)
    task = Language(context=context)
    task.tokenizer = tokenizer
    return task, examples


@cache
def _read(data: str | None, context: int) -> tuple[Tokenizer, Data]:
    task = Language(context=context)
    examples = task.open(data)
    return task.tokenizer, examples
