"""Images with captions in several languages, from a folder, an archive, or drawn."""

from __future__ import annotations

import random
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from manyheads.common.decompression import File
from manyheads.data.readers.archive import listing
from manyheads.data.readers.image import read_image
from manyheads.data.readers.records import IMAGES as IMAGE_SUFFIXES
from manyheads.data.readers.table import read_named_rows
from manyheads.tasks.picturebook import synthetic

TABLE = "captions.tsv"
LANGUAGE = re.compile(r"[a-z]{2,3}(-\w+)?")
EMBEDDED = 1500  # scenes


class Page(NamedTuple):
    """An image ``(3, size, size)`` as bytes, and its captions by language."""

    picture: Tensor
    captions: dict[str, str]


def drawn(size: int, languages: Sequence[str]) -> list[Page]:
    """Coloured shapes with captions in English and Chinese, or in one of them.

    >>> page = drawn(16, ["en"])[0]
    >>> page.picture.shape, list(page.captions)
    (torch.Size([3, 16, 16]), ['en'])
    """
    if unknown := [language for language in languages if language not in synthetic.LANGUAGES]:
        expected = ", ".join(synthetic.LANGUAGES)
        raise ValueError(f"languages: expected some of {expected} without data, got {unknown[0]!r}")
    generator = random.Random(0)
    pages = []
    for scene in synthetic.scenes(EMBEDDED):
        captions = scene.describe()
        image = synthetic.draw(scene, size, generator)
        pages.append(Page(image, {name: captions[name] for name in languages}))
    return pages


def read_pages(data: str, size: int, languages: Sequence[str]) -> tuple[list[Page], list[str], int]:
    """Images with their captions, the languages of these, and how many captions are empty.

    Parameters
    ----------
    data: a folder with images, or with zip archives of them, and ``captions.tsv``; a zip archive of all
        that; or a .tsv file with the images beside it. The column ``file`` names the image.
    size: height and width that images are scaled to.
    languages: columns with captions. If empty, all whose names are language codes, such as en or zh.
    """
    captions, files = _book(data)
    rows = read_named_rows(captions, ["file", *languages])
    if not rows:
        raise ValueError(f"data: {captions} has no rows; expected a line for each image")
    columns = list(languages) or [name for name in rows[0][1] if LANGUAGE.fullmatch(name)]
    if not columns:
        raise ValueError(f"data: {captions} has no captions; expected columns such as en or zh")
    pages = []
    for number, row in rows:
        if row["file"] not in files:
            raise ValueError(f"data: line {number} of {captions} names {row['file']!r}, which is not there")
        if written := {name: row[name] for name in columns if row[name]}:
            pages.append(Page(colour_image(files[row["file"]], size), written))
    if not pages:
        raise ValueError(f"data: {captions} has no caption; expected at least one")
    return pages, columns, len(rows) * len(columns) - sum(len(page.captions) for page in pages)


def colour_image(file: File, size: int) -> Tensor:
    """An image from a file, or from one in an archive, in colours: ``(3, size, size)`` bytes."""
    return read_image(file, size).expand(3, -1, -1)


def pairs(pages: Iterable[Page]) -> list[tuple[Page, str]]:
    """Every caption: its page, and its language."""
    return [(page, language) for page in pages for language in page.captions]


def _book(data: str) -> tuple[File, dict[str, Path | zipfile.Path]]:
    """The table of captions, and images by the names that it has for them."""
    path = Path(data).expanduser()
    is_table = path.is_file() and path.suffix.lower() == ".tsv"
    inside = listing(str(path.parent) if is_table else data, IMAGE_SUFFIXES | {".tsv", ".zip"})
    captions = path if is_table else inside.get(TABLE)
    if captions is None:
        raise ValueError(f"data: {data} has no {TABLE}; expected one with the columns file, en, zh and so on")
    files: dict[str, Path | zipfile.Path] = {}
    for name, file in inside.items():
        suffix = Path(name).suffix.lower()
        if suffix == ".zip" and isinstance(file, Path):
            files |= listing(str(file), IMAGE_SUFFIXES)
        elif suffix in IMAGE_SUFFIXES:
            files[name] = file
    if not files:
        raise ValueError(f"data: there are no images beside {captions}, nor in a zip archive there")
    return captions, files
