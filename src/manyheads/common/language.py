"""The language that people read on the terminal: `words` looks sentences up, English ones without a table."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
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

    The key of a sentence is its English: where a table lacks it, English is what is shown.

    >>> choose_language("zh")
    >>> words("{count:,} steps", count=1200), words("no such sentence")
    ('1,200 步', 'no such sentence')
    >>> choose_language("en")
    >>> words("{count:,} steps", count=1200)
    '1,200 steps'
    >>> choose_language(None)
    """
    language = current_language()
    sentence = english if language == "en" else table(language).get(english, english)
    return sentence.format(**values) if values else sentence


@cache
def table(language: Language) -> dict[str, str]:
    """English sentences and what they are in another language, from common/files."""
    file = resources.files("manyheads").joinpath(f"common/files/{language}.json")
    sentences: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return sentences
