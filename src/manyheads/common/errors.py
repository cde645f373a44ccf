"""Errors that one room raises and another reads."""

from __future__ import annotations


class UnreadDataError(ValueError):
    """What a model was trained on is not read, or cannot be. ``why`` is the sentence without its advice.

    >>> print(UnreadDataError("MODEL: out/language names a.txt, which is not in the folder", "a.txt"))
    MODEL: out/language names a.txt, which is not in the folder; give --data a.txt
    """

    def __init__(self, why: str, path: str = "DATA") -> None:
        super().__init__(f"{why}; give --data {path}")
        self.why = why
