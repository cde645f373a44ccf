"""Texts that studies let a model read, in samples that share nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from manyheads.data.readers.table import read_rows
from manyheads.data.text_lines import read_lines
from manyheads.tasks.language import standard_library
from manyheads.tasks.translation import EMBEDDED as PAIRS

# Embedded: sentences of ours, Python's documents, and numbers and dates in words, in two languages.
EMBEDDED = ("sentences", "documents", "english", "german")


@cache
def texts(source: str) -> tuple[str, ...]:
    """The texts of an embedded source, or the lines of a file.

    >>> [len(texts(source)) > 50 for source in EMBEDDED]
    [True, True, True, True]
    >>> texts("german")[0] == texts("english")[0]
    False
    """
    if source in ("english", "german"):
        column = source == "german"
        with resources.as_file(resources.files("manyheads").joinpath("data", "files", PAIRS)) as path:
            return tuple(row.cells[column] for row in read_rows(path))
    if source == "documents":
        paragraphs = (" ".join(part.split()) for text in standard_library() for part in text.split("\n\n"))
        return tuple(dict.fromkeys(part for part in paragraphs if _is_prose(part)))
    return tuple(read_lines(None if source == "sentences" else source, limit=None))


def sample(lines: Sequence[str], seed: int, seeds: int, size: int) -> list[str]:
    """One of several samples that share no line.

    >>> sample(["a", "b", "c", "d", "e"], seed=1, seeds=2, size=2)
    ['b', 'd']
    """
    taken = list(lines[seed::seeds][:size])
    if len(taken) < size:
        raise ValueError(
            f"sentences: {seeds} samples of {size} texts need {seeds * size} texts, and there are "
            f"{len(lines)}; expected fewer seeds or sentences, or more data"
        )
    return taken


def _is_prose(text: str) -> bool:
    """Whether a paragraph is a sentence or more, not code or a heading.

    >>> _is_prose("A name is bound to an object where it is assigned to."), _is_prose("x = f(1, 2) ** 3")
    (True, False)
    """
    words = re.findall(r"[A-Za-z]{2,}", text)
    return text[0].isupper() and text.endswith(".") and len(words) >= 8 and ">>>" not in text
