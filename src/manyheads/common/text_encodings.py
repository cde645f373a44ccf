"""Which encoding a text that is not UTF-8 may have, and the command that converts it."""

from __future__ import annotations

import shlex

# What a byte order mark says; then multi-byte encodings, which seldom decode what is not theirs.
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_ENCODINGS = ("GB18030", "SHIFT_JIS", "BIG5")


def probable_encoding(content: bytes) -> str:
    """The encoding of a text that is not UTF-8, by its name for iconv.

    >>> probable_encoding("注意力".encode("gb18030")), probable_encoding("Köpfe".encode("cp1252"))
    ('GB18030', 'WINDOWS-1252')
    >>> probable_encoding("heads".encode("utf-16"))
    'UTF-16'
    """
    for mark, name in _MARKS.items():
        if content.startswith(mark):
            return name
    for name in _ENCODINGS:
        try:
            text = content.decode(name)
        except UnicodeDecodeError:
            continue
        high = sum(byte > 127 for byte in content)
        if (
            2 * sum("\u3040" <= letter <= "\u9fff" or letter in "，。、：；？！“”（）" for letter in text)
            >= high
        ):
            return name
    return "WINDOWS-1252"


def how_to_convert(content: bytes, path: str) -> str:
    """What a user does with a text that is not UTF-8.

    >>> how_to_convert("Köpfe".encode("cp1252"), "heads.txt")
    'convert it: iconv -f WINDOWS-1252 -t UTF-8 heads.txt > utf8.txt (-f is its encoding, here a guess)'
    """
    source = "" if path in ("-", "standard input") else f" {shlex.quote(path)}"
    command = f"iconv -f {probable_encoding(content)} -t UTF-8{source} > utf8.txt"
    return f"convert it: {command} (-f is its encoding, here a guess)"
