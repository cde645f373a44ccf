"""Text in the cells of CSV files: what a spreadsheet would take for a formula is quoted, and read back."""

from __future__ import annotations

import re
from typing import Any

# See OWASP, "CSV Injection": these begin a formula, some of them in their full-width forms as well.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def to_cell(value: Any) -> Any:
    """What a spreadsheet shows as text, whatever the text is; numbers stay numbers.

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
