"""Write src/manyheads/data/files/numbers_and_dates.tsv: the data that the translation task comes with.

    pip install num2words==0.5.14 babel==2.18.0
    python tools/numbers_and_dates.py

Numbers, dates and times in English and German: a small world in which translating means reordering. German
says the ones before the tens (forty-two: zweiundvierzig), the day before the month, and counts the hours of
the day to 24. The words are those of num2words and babel.
"""

from __future__ import annotations

import random
from datetime import date, time, timedelta
from pathlib import Path

from babel.dates import format_date, format_time
from num2words import num2words

KINDS = ("number", "ordinal", "date", "time", "year")
PAIRS = 6000
FILE = Path(__file__).parents[1] / "src" / "manyheads" / "data" / "files" / "numbers_and_dates.tsv"


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Different sentences in English with their German, the same for the same seed."""
    draw = random.Random(seed)
    german_of: dict[str, str] = {}
    while len(german_of) < count:
        english, german = sentence(draw.choice(KINDS), draw)
        german_of[english] = german
    return list(german_of.items())


def sentence(kind: str, draw: random.Random) -> tuple[str, str]:
    """One sentence of a kind, in both languages."""
    number = int(10 ** draw.uniform(0, 6))
    if kind == "date":
        day = date(1900, 1, 1) + timedelta(days=draw.randrange(365 * 150))
        english, german = (format_date(day, "full", locale=name) for name in ("en_US", "de_DE"))
    elif kind == "time":
        moment = time(draw.randrange(24), draw.randrange(60), draw.randrange(60))
        # babel separates the hour from "PM" by a narrow space, which people do not type
        english, german = (
            format_time(moment, "medium", locale=n).replace("\u202f", " ") for n in ("en", "de")
        )
    else:
        if kind == "year":
            number = draw.randrange(1100, 2100)
        to = {"number": "cardinal"}.get(kind, kind)
        english, german = (num2words(number, lang=name, to=to) for name in ("en", "de"))
    return english, german


if __name__ == "__main__":
    rows = (f"{english}\t{german}\n" for english, german in pairs(PAIRS))
    FILE.write_text("".join(rows), encoding="utf-8")
