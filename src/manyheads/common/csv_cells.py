"""Text in the cells of CSV files: text that a spreadsheet would run as a formula is quoted, and read back."""

from __future__ import annotations

import re
from typing import TypeVar

# See OWASP, "CSV Injection": these begin a formula, some of them in their full-width forms as well.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
Cell = TypeVar("Cell")


def to_cell(value: Cell) -> Cell | str:
    """A cell that a spreadsheet shows as text, never runs as a formula; numbers stay numbers.

    >>> to_cell("=1+1"), to_cell("head"), to_cell(-0.5), to_cell("'-")
    ("'=1+1", 'head', -0.5, "''-")
    """
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def from_cell(text: str) -> str:
    """The text that `to_cell` wrote.

    >>> from_cell("'=1+1"), from_cell("''-"), from_cell("'tis"), from_cell("-0.5")
    ('=1+1', "'-", "'tis", '-0.5')
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text
