"""Pictures with captions in several languages, from a folder, an archive, or drawn."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from manyheads.data.corpus import PICTURES
from manyheads.data.readers.archive import listing, table
from manyheads.data.readers.image import read_picture
from manyheads.tasks.picturebook import synthetic

TABLE = "captions.tsv"
LANGUAGE = re.compile(r"[a-z]{2,3}(-\w+)?")
EMBEDDED = 1500  # scenes


class Page(NamedTuple):
    """A picture ``(3, size, size)`` as bytes, and its captions by language."""

    picture: Tensor
    captions: dict[str, str]


def drawn(size: int, languages: Sequence[str]) -> list[Page]:
    """Coloured shapes with captions in English and Chinese, or in one of them.

    >>> page = drawn(16, ["en"])[0]
    >>> page.picture.shape, list(page.captions)
    (torch.Size([3, 16, 16]), ['en'])
    """
    if unknown := [language for language in languages if language not in synthetic.LANGUAGES]:
        known = ", ".join(synthetic.LANGUAGES)
        raise ValueError(f"languages: expected some of {known} without data, got {unknown[0]!r}")
    chance = random.Random(0)
    made = ((synthetic.draw(scene, size, chance), scene.describe()) for scene in synthetic.scenes(EMBEDDED))
    return [Page(picture, {name: said[name] for name in languages}) for picture, said in made]


def read_pages(data: str, size: int, languages: Sequence[str]) -> tuple[list[Page], list[str], int]:
    """Pictures with their captions, the languages of these, and how many captions are empty.

    Parameters
    ----------
    data: a folder with pictures, or with zip archives of them, and ``captions.tsv``; a zip archive of all
        that; or a .tsv file, beside which the pictures are. The column ``file`` names the picture.
    size: height and width that pictures are brought to.
    languages: columns with captions; without any, all that are called like en or zh.
    """
    captions, files = _book(data)
    rows = table(captions, ["file", *languages])
    if not rows:
        raise ValueError(f"data: {captions} has no rows; expected a line for each picture")
    found = list(languages) or [name for name in rows[0][1] if LANGUAGE.fullmatch(name)]
    if not found:
        raise ValueError(f"data: {captions} has no captions; expected columns such as en or zh")
    pages = []
    for number, row in rows:
        if row["file"] not in files:
            raise ValueError(f"data: line {number} of {captions} names {row['file']!r}, which is not there")
        if said := {name: row[name] for name in found if row[name]}:
            pages.append(Page(picture(files[row["file"]], size), said))
    if not pages:
        raise ValueError(f"data: {captions} has no caption; expected at least one")
    return pages, found, len(rows) * len(found) - sum(len(page.captions) for page in pages)


def picture(file: Any, size: int) -> Tensor:
    """A picture from a file, or from one in an archive, in colours: ``(3, size, size)`` bytes."""
    return read_picture(file, size).expand(3, -1, -1)


def pairs(pages: Iterable[Page]) -> list[tuple[Page, str]]:
    """Every caption: its page, and its language."""
    return [(page, language) for page in pages for language in page.captions]


def _book(data: str) -> tuple[Any, dict[str, Any]]:
    """The table of captions, and pictures by the names that it has for them."""
    path = Path(data).expanduser()
    given = path.is_file() and path.suffix.lower() == ".tsv"
    found = listing(str(path.parent) if given else data, PICTURES | {".tsv", ".zip"})
    captions = path if given else found.get(TABLE)
    if captions is None:
        raise ValueError(f"data: {data} has no {TABLE}; expected one with the columns file, en, zh and so on")
    files: dict[str, Any] = {}
    for name, file in found.items():
        suffix = Path(name).suffix.lower()
        if suffix == ".zip" and isinstance(file, Path):
            files |= listing(str(file), PICTURES)
        elif suffix in PICTURES:
            files[name] = file
    if not files:
        raise ValueError(f"data: there are no pictures beside {captions}, nor in a zip archive there")
    return captions, files
