"""Numbers, dates and times in English and German: a small world in which translating means reordering.

German says the ones before the tens (forty-two: zweiundvierzig), the day before the month, and counts the
hours of the day to 24. The words are those of num2words and babel.
"""

from __future__ import annotations

import random
from datetime import date, time, timedelta

KINDS = ("number", "ordinal", "date", "time", "year")


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Different sentences in English with their German, the same for the same seed.

    >>> pairs(3)[0]
    ('...', '...')
    """
    try:
        import babel.dates  # noqa: F401
        import num2words  # noqa: F401
    except ImportError:
        raise ImportError(
            "the embedded translation data need num2words and babel: pip install 'manyheads[train]'"
        ) from None
    chance = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        english, german = sentence(chance.choice(KINDS), chance)
        found[english] = german
    return list(found.items())


def sentence(kind: str, chance: random.Random) -> tuple[str, str]:
    """One sentence of a kind, in both languages.

    >>> sentence("number", random.Random(3))
    ('...', '...')
    """
    from babel.dates import format_date, format_time
    from num2words import num2words

    number = int(10 ** chance.uniform(0, 6))
    if kind == "date":
        day = date(1900, 1, 1) + timedelta(days=chance.randrange(365 * 150))
        english, german = (format_date(day, "full", locale=name) for name in ("en_US", "de_DE"))
    elif kind == "time":
        moment = time(chance.randrange(24), chance.randrange(60), chance.randrange(60))
        # babel separates the hour from "PM" by a narrow space, which nobody types
        english, german = (
            format_time(moment, "medium", locale=n).replace("\u202f", " ") for n in ("en", "de")
        )
    else:
        if kind == "year":
            number = chance.randrange(1100, 2100)
        to = {"number": "cardinal"}.get(kind, kind)
        english, german = (num2words(number, lang=name, to=to) for name in ("en", "de"))
    return english, german
