"""The language that people read on the terminal: `words` looks sentences up, English ones without a table."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from importlib import resources
from string import Formatter
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
_NUMBERS = r"\d[\d.,]*(?:, \d[\d.,]*)*(?: and \d[\d.,]*)?"
_chosen: list[Language] = []  # by an option; the locale counts where there is none


def choose_language(language: str | None) -> None:
    """Choose the language of this process: ``en`` or ``zh``; None for that of the locale."""
    if language is not None and language not in get_args(Language):
        raise ValueError(f"language: got {language!r}; expected one of {', '.join(get_args(Language))}")
    _chosen[:] = [] if language is None else [language]  # type: ignore[list-item]


def current_language() -> Language:
    """The language that was chosen, else that of the locale (LC_ALL, LC_MESSAGES or LANG), else English."""
    if _chosen:
        return _chosen[0]
    locale = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


def words(english: str, /, **values: Any) -> str:
    """A sentence in the language of the user, with values in it.

    The key of a sentence is its English: where a table lacks it, English is what is shown. Sentences that
    lower rooms have put together (notes, measures, why something was not judged) are recognised with their
    values in them.

    >>> choose_language("zh")
    >>> words("{count:,} steps", count=1200), words("no such sentence")
    ('1,200 步', 'no such sentence')
    >>> words("labels are names of classes (0 bad, 1 good)")
    '标签是类别的名称（0 bad, 1 good）'
    >>> choose_language("en")
    >>> words("{count:,} steps", count=1200)
    '1,200 steps'
    >>> choose_language(None)
    """
    language = current_language()
    if language == "en":
        return english.format(**values) if values else english
    sentence = table(language).get(english)
    if sentence is not None:
        return sentence.format(**values) if values else sentence
    return english.format(**values) if values else _recognised(english, language)


@cache
def table(language: Language, part: str = "") -> dict[str, str]:
    """English sentences and what they are in another language, from common/files.

    The part ``-notes`` has those that come put together: their values are whatever stands there.
    """
    file = resources.files("manyheads").joinpath(f"common/files/{language}{part}.json")
    sentences: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return sentences


def _recognised(english: str, language: Language) -> str:
    """A sentence with values in it, in another language; its values, too, as far as they have one."""
    for pattern, sentence in _patterns(language):
        if match := pattern.fullmatch(english):
            return sentence.format(**{name: words(value) for name, value in match.groupdict().items()})
    return english


@cache
def _patterns(language: Language) -> list[tuple[re.Pattern[str], str]]:
    """What recognises each sentence of the notes; ``{count:n}`` stands for numbers."""
    patterns = []
    for english, sentence in table(language, "-notes").items():
        pattern = ""
        for text, name, spec, _ in Formatter().parse(english):
            value = _NUMBERS if spec == "n" else ".+?"
            pattern += re.escape(text) + (f"(?P<{name}>{value})" if name else "")
        patterns.append((re.compile(pattern, re.DOTALL), sentence))
    return patterns
