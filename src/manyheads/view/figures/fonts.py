"""Fonts for figures with Chinese, Japanese or Korean: those of the machine, or which to install."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

from manyheads.common.language import words

# Families with such characters, those with simplified Chinese first.
EAST_ASIAN = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Microsoft YaHei", "SimHei", "SimSun",
    "Noto Serif CJK SC", "Noto Sans CJK JP", "Noto Serif CJK JP", "Droid Sans Fallback", "Unifont",
    "Arial Unicode MS", "AR PL UMing CN", "AR PL UKai CN",
)  # fmt: skip
LATIN = "DejaVu Sans"  # comes with matplotlib
_FILES = (
    "cjk",
    "wqy",
    "hei",
    "song",
    "pingfang",
    "hiragino",
    "yahei",
    "fallback",
    "unifont",
    "uming",
    "ukai",
)


def families(texts: Iterable[str]) -> tuple[list[str], str]:
    """Font families that together have the characters of some texts, and those that no font here has.

    >>> families(["heads"])
    (['DejaVu Sans'], '')
    """
    left = {letter for text in texts for letter in text if letter.isprintable() and ord(letter) > 0x2E7F}
    chosen = [LATIN]
    for name in EAST_ASIAN if left else ():
        if left and (covered := left & _characters(name)):
            chosen.append(name)
            left -= covered
    return chosen, "".join(sorted(left))


def missing_note(missing: str) -> str:
    """What a figure says that lacks characters; empty if none are missing.

    >>> missing_note("")
    ''
    """
    if not missing:
        return ""
    shown = missing[:8] + ("..." if len(missing) > 8 else "")
    return words(
        "No font on this machine has {characters}: install one, for instance by apt install fonts-noto-cjk "
        "or from the Noto CJK project.",
        characters=shown,
    )


@contextmanager
def with_fonts(texts: Iterable[str]) -> Iterator[str]:
    """A context in which matplotlib draws these texts; gives the note about characters without a font."""
    from matplotlib import rc_context

    chosen, missing = families(texts)
    with rc_context({"font.family": chosen}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield missing_note(missing)


@cache
def _installed() -> dict[str, str]:
    """The file of each East Asian family, also of fonts that were installed after matplotlib looked."""
    from matplotlib import font_manager

    manager = font_manager.fontManager
    files = {font.name: font.fname for font in manager.ttflist if font.name in EAST_ASIAN}
    files = {name: file for name, file in files.items() if os.path.exists(file)}
    if not files:
        for file in font_manager.findSystemFonts():
            if any(part in os.path.basename(file).lower() for part in _FILES):
                manager.addfont(file)
        files = {font.name: font.fname for font in manager.ttflist if font.name in EAST_ASIAN}
    return files


@cache
def _characters(family: str) -> frozenset[str]:
    """What a family has; nothing if it is not installed."""
    from matplotlib.ft2font import FT2Font

    file = _installed().get(family)
    return frozenset() if file is None else frozenset(map(chr, FT2Font(file).get_charmap()))
