"""Bytes and images out of files and archives: what claims to be enormous is refused, not unpacked."""

from __future__ import annotations

import gzip
import io
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from manyheads.common.errors import first_line
from manyheads.common.json_files import in_one_sentence, read_bytes, regular_file

if TYPE_CHECKING:
    from PIL.Image import Image

# A file, or a member of a zip archive.
File: TypeAlias = str | PathLike[str] | zipfile.Path

# Compressed content may grow to this many times its size, or to this many bytes.
GROWTH, FLOOR = 200, 200_000_000
MOST_PIXELS = 2**26  # of an image


def content_of(file: File, name: str) -> bytes:
    """The bytes of a file, or of a member of an archive (`zipfile.Path`).

    Parameters
    ----------
    file: the file.
    name: what the message of a ValueError begins with: an option, as ``data``.
    """
    if not isinstance(file, zipfile.Path):
        return read_bytes(Path(file), name)
    try:
        info = file.root.getinfo(file.at)
        check_growth(info.file_size, info.compress_size, f"{name}: {file}")
        return file.read_bytes()
    except (OSError, EOFError, LookupError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{name}: {file} cannot be read ({first_line(error)}); pack the archive again"
        ) from None


def open_archive(path: Path, name: str) -> zipfile.ZipFile:
    """A zip archive; what is in it is read by `content_of`."""
    try:
        return zipfile.ZipFile(regular_file(path, name))
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ValueError(f"{name}: {path} is not a readable zip archive ({first_line(error)})") from None


def check_archive(content: bytes, name: str) -> None:
    """Raise a ValueError when the members of a zip archive are together much larger than it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            total = sum(info.file_size for info in archive.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ValueError(f"{name} is not a readable archive ({first_line(error)})") from None
    check_growth(total, len(content), name)


def decompressed(content: bytes, name: str) -> bytes:
    """The content that gzip compressed; content that is not compressed is left as it is.

    >>> decompressed(gzip.compress(b"ACGT"), "data: a.fa.gz"), decompressed(b"ACGT", "data: a.fa")
    (b'ACGT', b'ACGT')
    """
    if content[:2] != b"\x1f\x8b":
        return content
    most = max(FLOOR, GROWTH * len(content))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked_content = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{name} is damaged ({first_line(error)}); get it again") from None
    check_growth(len(unpacked_content), len(content), name)
    return unpacked_content


@contextmanager
def open_image(file: File | bytes, name: str) -> Iterator[Image]:
    """An image of Pillow, from a file or one in an archive; whatever is wrong with it is one sentence.

    Parameters
    ----------
    file: the file, or its content.
    name: what the message of a ValueError begins with: an option, as ``images``.
    """
    try:
        import PIL
        from PIL import Image
    except ImportError:
        raise ImportError("images need Pillow: pip install 'manyheads[train]'") from None
    content = file if isinstance(file, bytes) else content_of(file, name)
    label = "an image of the data" if isinstance(file, bytes) else file
    with (
        in_one_sentence(f"{name}: {label} is not a readable image; repair or remove it"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about damage that Pillow can live with
        try:
            opened = Image.open(io.BytesIO(content))
        except PIL.UnidentifiedImageError:
            raise ValueError("not in a format that Pillow knows") from None
        with opened as image:
            if math.prod(image.size) > MOST_PIXELS:
                raise ValueError(f"{image.size[0]:,} x {image.size[1]:,} pixels, over {MOST_PIXELS:,}")
            yield image


def check_growth(size: int, packed: int, name: str) -> None:
    """Raise a ValueError when compressed content of ``packed`` bytes would become one of ``size`` bytes."""
    if size > max(FLOOR, GROWTH * packed):
        raise ValueError(
            f"{name} has {packed:,} bytes and would unpack to {size:,}; unpack it yourself if that is right"
        )
