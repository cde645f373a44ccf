"""Ways to damage a file: what disks, networks, other programs and people who mean harm do to it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import struct
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

LONG = 200_000  # characters: more than a field of CSV may have
DEEP = 20_000  # lists inside of each other
BOMB = 300_000_000  # bytes of nothing, packed

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 1.5, -0.5, 1e308, 10**9, -(10**9), 2**31, 2**63, 10**30, 10**400, "",
    "x", "1", "\ud800", "\x00", "../../etc/passwd", "=1+1", "x" * LONG, [], {}, [[]], [None], [1, "2"],
    {"a": 1}, {"": {}}, float("nan"), float("inf"),
]  # fmt: skip


# --- any file


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 20))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def flip_near_the_start(content: bytes, chance: random.Random) -> bytes:
    return flip(content[:256], chance) + content[256:]


def delete(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    return content[:start] + content[start + chance.choice((1, 2, 10, 1000)) :]


def insert(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    return content[:start] + chance.randbytes(chance.choice((1, 4, 100))) + content[start:]


def repeat(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    part = content[start : start + chance.choice((1, 10, 1000))]
    return content[:start] + part * chance.choice((2, 50)) + content[start:]


def swap(content: bytes, chance: random.Random) -> bytes:
    a, b, c = sorted(chance.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def nothing(content: bytes, chance: random.Random) -> bytes:
    return b""


def blank(content: bytes, chance: random.Random) -> bytes:
    return chance.choice((b"\n", b" ", b"\0", b"\t\t\n", b"\r\n\r\n", b"\xef\xbb\xbf")) * chance.choice(
        (1, 100)
    )


def something_else(content: bytes, chance: random.Random) -> bytes:
    return chance.choice(
        (b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"\x1f\x8b\x08", b"{}", b"[]", b"null", b"<html>",
         b"RIFF\0\0\0\0WAVE", b"\x93NUMPY\x01\0", b"PAR1", b">a\nACGT\n")
    )  # fmt: skip


def other_encoding(content: bytes, chance: random.Random) -> bytes:
    text = content.decode("utf-8", "replace")
    return text.encode(chance.choice(("utf-16", "utf-32", "utf-16-be", "utf-7")), "replace")


def bad_bytes(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    return (
        content[:start]
        + chance.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\0", b"\r"))
        + content[start:]
    )


def long_field(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    return content[:start] + chance.choice((b"x", b"9", b"A", b'"', b",", b"\t")) * LONG + content[start:]


def other_numbers(content: bytes, chance: random.Random) -> bytes:
    places = list(re.finditer(rb"\d+(\.\d+)?", content[:100_000]))
    if not places:
        return insert(content, chance)
    place = chance.choice(places)
    number = chance.choice(
        (
            b"-1",
            b"0",
            b"1e999",
            b"nan",
            b"inf",
            b"99999999999999999999",
            b"9" * 5000,
            b"1e308",
            b"0.5",
            b"",
            b"x",
        )
    )
    return content[: place.start()] + number + content[place.end() :]


def other_words(content: bytes, chance: random.Random) -> bytes:
    """Overwrite two, four or eight bytes with a number that sizes and offsets of binary files may claim."""
    if len(content) < 16:
        return flip(content, chance)
    size = chance.choice((2, 4, 8))
    number = chance.choice((0, 1, -1, 2**7, 2**15 - 1, 2**31 - 1, 2**63 - 1, chance.getrandbits(63)))
    packed = struct.pack("<q" if chance.random() < 0.7 else ">q", number)[:size]
    start = (
        chance.randrange(min(len(content) - 8, 4000)) if chance.random() < 0.8 else len(content) - 8 - size
    )
    return content[:start] + packed + content[start + size :]


ANY: tuple[Mutation, ...] = (
    truncate, flip, flip_near_the_start, delete, insert, repeat, swap, nothing, blank, something_else,
    other_encoding, bad_bytes, long_field, other_numbers, other_words,
)  # fmt: skip


# --- JSON


def json_value(content: bytes, chance: random.Random) -> bytes:
    """Put another value, most often of another type, somewhere in a document."""
    document = _document(content)
    return flip(content, chance) if document is None else _dumped(_changed(document, chance))


def json_key(content: bytes, chance: random.Random) -> bytes:
    """Take a key away, add one, or say one twice."""
    document = _document(content)
    if not isinstance(document, dict) or not document:
        return flip(content, chance)
    objects = [item for item in _walk(document) if isinstance(item, dict) and item]
    one = chance.choice(objects)
    key = chance.choice(list(one))
    what = chance.randrange(4)
    if what == 0:
        del one[key]
    elif what == 1:
        one[f"{key} "] = one.pop(key)
    elif what == 2:
        one[chance.choice(("", "\x00", "__class__", "x" * 1000, "../x"))] = chance.choice(VALUES)
    else:
        text = _dumped(document)
        return b'{"format": 7, "version": [], ' + text.lstrip()[1:]
    return _dumped(document)


def json_deep(content: bytes, chance: random.Random) -> bytes:
    """Nest something very deeply: all of it, or one value."""
    brackets = chance.choice((("[", "]"), ('{"a":', "}")))
    depth = chance.choice((40, 900, DEEP))
    inner = "0"
    document = _document(content)
    deep = brackets[0] * depth + inner + (brackets[1] * depth if chance.random() < 0.8 else "")
    if document is None or chance.random() < 0.3:
        return deep.encode()
    mark = "manyheads-mark"
    return _dumped(_changed(document, chance, mark)).replace(f'"{mark}"'.encode(), deep.encode())


def json_several(content: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((2, 5))):
        content = json_value(content, chance)
    return content


JSON: tuple[Mutation, ...] = (json_value, json_value, json_value, json_key, json_key, json_deep, json_several)


def _document(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _dumped(document: Any) -> bytes:
    return json.dumps(document, indent=1).encode("utf-8", "surrogatepass")


def _walk(document: Any) -> list[Any]:
    items, layer = [], [document]
    while layer:
        items += layer
        layer = [
            inside
            for item in layer
            if isinstance(item, dict | list)
            for inside in (item.values() if isinstance(item, dict) else item)
        ]
    return items


def _changed(document: Any, chance: random.Random, value: Any = None) -> Any:
    """The document with a value at a random place; deep places as likely as high ones."""
    new = value if value is not None else chance.choice(VALUES)
    if not isinstance(document, dict | list) or not document:
        return new
    one = document
    while True:
        key: Any = chance.choice(list(one)) if isinstance(one, dict) else chance.randrange(len(one))
        inside = one[key]
        if not isinstance(inside, dict | list) or not inside or chance.random() < 0.35:
            one[key] = new
            return document
        one = inside


# --- containers


def safetensors_header(content: bytes, chance: random.Random) -> bytes:
    """Change the JSON header of a safetensors file, and keep its length right."""
    if len(content) < 8:
        return nothing(content, chance)
    size = struct.unpack("<Q", content[:8])[0]
    header = chance.choice(JSON)(content[8 : 8 + size], chance)
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def zip_tricks(content: bytes, chance: random.Random) -> bytes:
    """An archive with members that lie, grow, are there twice, or are called like somewhere else."""
    if not content.startswith(b"PK"):
        return flip(content, chance)
    what = chance.randrange(4)
    packed = io.BytesIO(content)
    try:
        with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as archive:
            names = archive.namelist()
            name = chance.choice(names)
            if what == 0:
                return bytes(_bomb(f"bomb{Path(name).suffix}"))
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                odd = (name, f"../{name}", f"/{name}", f"{name}/x", "a" * 300 + Path(name).suffix)
                archive.writestr(chance.choice(odd), chance.randbytes(30))
    except (zipfile.BadZipFile, ValueError, IndexError):
        return flip(content, chance)
    return packed.getvalue() if what < 3 else flip(packed.getvalue(), chance)


def gzip_tricks(content: bytes, chance: random.Random) -> bytes:
    """Packed twice, packed nothing, or very much of it."""
    what = chance.randrange(3)
    if what == 0:
        return bytes(_gzip_bomb())
    return gzip.compress(content if what == 1 else b"", mtime=0)


@lru_cache(maxsize=4)
def _bomb(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        for _ in range(BOMB // 1_000_000):
            member.write(bytes(1_000_000))
    return packed.getvalue()


@lru_cache(maxsize=1)
def _gzip_bomb() -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        for _ in range(5 * BOMB // 1_000_000):
            file.write(bytes(1_000_000))
    return packed.getvalue()


# --- what stands there instead of a file


def replace_path(path: Path, chance: random.Random) -> str:
    """Put something else than a file in a file's place; what it is."""
    kind = chance.choice(("pipe", "folder", "missing", "device", "loop", "empty device"))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty device":
        path.symlink_to("/dev/null")
    elif kind == "loop":
        path.symlink_to(path)
    return kind


def mutate(path: Path, chance: random.Random) -> str:
    """Damage a file, in a way that suits it; the name of the way."""
    if chance.random() < 0.03:
        return replace_path(path, chance)
    kinds: tuple[Mutation, ...] = ANY
    suffix = path.suffix
    if suffix in (".json", ".jsonl"):
        kinds = ANY + 4 * JSON
    elif suffix == ".safetensors":
        kinds = ANY + 8 * (safetensors_header,)
    elif suffix in (".zip", ".npz"):
        kinds = ANY + 5 * (zip_tricks,)
    elif suffix == ".gz":
        kinds = ANY + 5 * (gzip_tricks,)
    way = chance.choice(kinds)
    content = path.read_bytes()
    if suffix == ".jsonl" and way in JSON:
        lines = content.splitlines()
        number = chance.randrange(len(lines))
        lines[number] = b" ".join(way(lines[number], chance).split(b"\n"))
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_bytes(way(content, chance))
    return way.__name__
