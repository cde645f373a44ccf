"""The lines of a text file, and the pieces of a line that fit a model; errors name the line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from manyheads.common.text_encodings import how_to_convert

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A line longer than this is a file without line breaks.
LONGEST_LINE = 1_000_000


def read_lines(path: str | None, limit: int | None) -> Iterator[str]:
    """The lines that are not empty, one at a time: of a file, of ``-`` (standard input), or of our text.

    >>> len(list(read_lines(None, limit=3)))
    3
    """
    if path is None:
        text = resources.files("manyheads").joinpath("data/files/text.txt").read_text(encoding="utf-8")
        yield from text.splitlines()[:limit]
        return
    if path == "-":
        yield from _check_lines(sys.stdin.buffer, "standard input", limit)
        return
    if not Path(path).is_file():
        kind = "a folder" if Path(path).is_dir() else "not a file"
        raise ValueError(f"text: {path} is {kind}; expected a text file, one text per line")
    with open(path, "rb") as file:
        yield from _check_lines(file, path, limit)


def _check_lines(file: BinaryIO, name: str, limit: int | None) -> Iterator[str]:
    texts_read = number = 0
    while limit is None or texts_read < limit:
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            break
        number += 1
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"text: line {number} of {name} has over {LONGEST_LINE:,} bytes; expected one text per line: "
                "break it into lines first, for instance with `fold -s`"
            )
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text: line {number} of {name} is not UTF-8 (byte {line[error.start]:#04x} at position "
                f"{error.start}); {how_to_convert(line, name)}"
            ) from None
        if text:
            texts_read += 1
            yield text
    if not texts_read:
        raise ValueError(f"text: {name} is empty; expected at least one line of text")


def pieces(tokenizer: PreTrainedTokenizerBase, line: str, length: int | None) -> list[list[int]]:
    """The ids of a text, with the special tokens of the model, in pieces that fit."""
    if not callable(tokenizer):
        raise ValueError(
            f"text: expected a tokenizer that can be called with a text, got {type(tokenizer).__name__}"
        )
    if length is None or not getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(line)
        ids = encoded["input_ids"] if isinstance(encoded, Mapping) else list(encoded)
        return [ids[i : i + length] for i in range(0, len(ids), length)] if length else [ids] if ids else []
    least = tokenizer.num_special_tokens_to_add() + 1
    if length < least:
        raise ValueError(
            f"max-length: got {length}; this tokenizer needs at least {least} for one token of text"
        )
    encoded = tokenizer(line, truncation=True, max_length=length, return_overflowing_tokens=True)
    return [ids for ids in encoded["input_ids"] if ids]
