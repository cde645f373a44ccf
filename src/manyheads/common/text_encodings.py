"""Which encoding a text that is not UTF-8 may have, and the command that converts it."""

from __future__ import annotations

import re
import shlex

_MARKS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16


def probable_encoding(content: bytes) -> str:
    """The encoding of a text that is not UTF-8, by its name for iconv: GB18030 if bytes above 127 come in
    pairs, as those of Chinese characters do.

    >>> probable_encoding("注意力".encode("gb18030")), probable_encoding("Köpfe".encode("cp1252"))
    ('GB18030', 'WINDOWS-1252')
    >>> probable_encoding("heads".encode("utf-16"))
    'UTF-16'
    """
    if content.startswith(_MARKS):
        return "UTF-16"
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", content)]
    try:
        content.decode("gb18030")
    except UnicodeDecodeError:
        return "WINDOWS-1252"
    return "GB18030" if sum(run for run in runs if run > 1) > 0.8 * sum(runs) else "WINDOWS-1252"


def how_to_convert(content: bytes, path: str) -> str:
    """What a user does with a text that is not UTF-8.

    >>> how_to_convert("Köpfe".encode("cp1252"), "heads.txt")
    'convert it: iconv -f WINDOWS-1252 -t UTF-8 heads.txt > utf8.txt (-f is its encoding, here a guess)'
    """
    source = "" if path in ("-", "standard input") else f" {shlex.quote(path)}"
    command = f"iconv -f {probable_encoding(content)} -t UTF-8{source} > utf8.txt"
    return f"convert it: {command} (-f is its encoding, here a guess)"
