"""Treebanks: sentences with their dependencies, from a CoNLL-U file, every mistake with its line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

_Row = tuple[int, dict[str, Any]]  # a line's number, and its fields as conllu parses them


class Word(NamedTuple):
    """A word: its characters [start, stop) in the text, the number of its head (-1: root), its relation."""

    form: str
    start: int
    stop: int
    head: int
    relation: str
    line: int


@dataclass(frozen=True)
class Sentence:
    """A sentence of a treebank. Words that share their characters (a contraction) have an empty span."""

    text: str
    words: list[Word]
    line: int


def read(path: str | PathLike[str]) -> list[Sentence]:
    """The sentences of a CoNLL-U file. Raises a ValueError with file and line where one is broken.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".conllu") as file:
    ...     _ = file.write("1 Heads _ _ _ _ 2 nsubj _ _\\n2 look _ _ _ _ 0 root _ _\\n".replace(" ", "\\t"))
    ...     file.flush()
    ...     [(word.form, word.head, word.relation) for word in read(file.name)[0].words]
    [('Heads', 1, 'nsubj'), ('look', -1, 'root')]
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"treebank: there is no file {path}; expected sentences in CoNLL-U")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"treebank: {path} is not UTF-8 text ({error}); convert it") from error
    sentences = [_sentence(path, block) for block in _blocks(lines)]
    if not sentences:
        raise ValueError(f"treebank: {path} holds no sentence; expected CoNLL-U, ten columns a word")
    return sentences


def _blocks(lines: list[str]) -> Iterator[list[tuple[int, str]]]:
    """The lines of each sentence with their numbers."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            block.append((number, line))
        elif block:
            if any(not line.startswith("#") for _, line in block):
                yield block
            block = []


def _sentence(path: str | PathLike[str], block: list[tuple[int, str]]) -> Sentence:
    try:
        from conllu.exceptions import ParseException
        from conllu.parser import parse_line
    except ImportError:
        raise ImportError("treebanks need conllu: pip install 'manyheads[treebank]'") from None
    text = None
    rows: list[_Row] = []
    for number, line in block:
        if line.startswith("#"):
            name, _, value = line[1:].partition("=")
            text = value.strip() if name.strip() == "text" else text
            continue
        if line.count("\t") != 9:
            raise _format_error(path, number, f"{line.count(chr(9)) + 1} columns", "ten, between tabs")
        try:
            rows.append((number, parse_line(line, _FIELDS)))
        except ParseException as error:
            raise _format_error(path, number, str(error), "a line of CoNLL-U") from error
    return _align_words(path, text, rows, block[0][0])


_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


def _align_words(path: str | PathLike[str], text: str | None, rows: list[_Row], line: int) -> Sentence:
    """Find each word in the text, or make the text of the words."""
    words: list[Word] = []
    position = 0  # where in the text the next form begins
    text_so_far = ""
    contraction: tuple[int, int] | None = None  # the first and last word of a contraction
    contraction_forms: list[str] = []
    for number, row in rows:
        identity = row["id"]
        if isinstance(identity, tuple) and identity[1] == ".":
            continue  # an empty node, which is not in the text
        space = (row["misc"] or {}).get("SpaceAfter") != "No"
        if isinstance(identity, tuple):
            contraction = identity[0], identity[2]
            forms = [r["form"] for _, r in rows if r["id"] in range(contraction[0], contraction[1] + 1)]
            contraction_forms = forms if "".join(forms) == row["form"] else []
            start = _find(path, number, text, row["form"], position)
            position, text_so_far, start = _append_form(text, text_so_far, row["form"], space, start)
            reading = start
            continue
        if identity != len(words) + 1:
            raise _format_error(path, number, f"word number {identity}", str(len(words) + 1))
        head = row["head"]
        if not isinstance(head, int) or head < 0:
            raise _format_error(path, number, f"the head {head!r}", "the number of a word, or 0 for the root")
        if contraction is not None and contraction[0] <= identity <= contraction[1]:
            start, stop = (reading, reading + len(row["form"])) if contraction_forms else (0, 0)
            reading = stop
        else:
            start = _find(path, number, text, row["form"], position)
            position, text_so_far, start = _append_form(text, text_so_far, row["form"], space, start)
            stop = start + len(row["form"])
        words.append(Word(row["form"], start, stop, head - 1, str(row["deprel"]), number))
    for word in words:
        if word.head >= len(words):
            raise _format_error(path, word.line, f"the head {word.head + 1}", f"at most {len(words)}")
    return Sentence(text_so_far.rstrip() if text is None else text, words, line)


def _find(path: str | PathLike[str], number: int, text: str | None, form: str, at: int) -> int:
    """The position of a form in the text."""
    if text is None:
        return at
    start = text.find(form, at)
    if start < 0 or text[at:start].strip():
        raise _format_error(
            path, number, f"the word {form!r}", f"what follows in '# text': {text[at:].strip()[:30]!r}"
        )
    return start


def _append_form(
    text: str | None, text_so_far: str, form: str, space: bool, start: int
) -> tuple[int, str, int]:
    """Where the next form begins, the text made of the words so far, and where this form begins."""
    if text is not None:
        return start + len(form), text_so_far, start
    longer = text_so_far + form + (" " if space else "")
    return len(longer), longer, len(text_so_far)


def _format_error(path: str | PathLike[str], line: int, got: str, expected: str) -> ValueError:
    return ValueError(f"treebank: {path}, line {line}: got {got}; expected {expected}")
