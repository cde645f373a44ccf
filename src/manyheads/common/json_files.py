"""Files from elsewhere, checked when they are read, so that later code can rely on their types.

A document is described by types, most often a TypedDict; `read_json` returns a value of that type, or raises
a ValueError that says in one sentence what is wrong with the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, Union

from manyheads.common.errors import describe_error, first_line

LARGEST = 64_000_000  # bytes of a document
DEEPEST = 32  # lists and objects inside of each other
_WHOLE = 2**63  # numbers beyond do not fit the integers of tensors

Kind = TypeVar("Kind")


def regular_file(path: str | os.PathLike[str], name: str) -> Path:
    """A path that is a regular file. Pipes and devices, which may never end, are refused.

    Parameters
    ----------
    path: the file.
    name: what the message of a ValueError begins with: an option, as ``data``.

    >>> regular_file("/dev/null", "plan")
    Traceback (most recent call last):
    ValueError: plan: /dev/null is a device; expected a file: save it as one first
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{name}: there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {path} cannot be read ({_error_text(error)})") from None
    if stat.S_ISREG(mode):
        return path
    kinds = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}
    what = next((kind for kind, test in kinds.items() if test(mode)), "a device")
    raise ValueError(f"{name}: {path} is {what}; expected a file: save it as one first")


def read_bytes(path: str | os.PathLike[str], name: str, largest: int | None = None) -> bytes:
    """The content of a regular file of at most ``largest`` bytes."""
    file = regular_file(path, name)
    try:
        size = file.stat().st_size
        if largest is not None and size > largest:
            raise ValueError(f"{name}: {path} has {size:,} bytes; expected at most {largest:,}")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read ({_error_text(error)})") from error


def read_json(
    path: str | os.PathLike[str],
    kind: type[Kind],
    name: str,
    *,
    format: str | None = None,
    version: int = 0,
    largest: int = LARGEST,
    infinite: bool = False,
) -> Kind:
    """The document in a JSON file, if it is of this type.

    Parameters
    ----------
    path: the file.
    kind: a TypedDict, or any type that `check_type` knows.
    name: what the message of a ValueError begins with.
    format, version: what the document must say that it is, and the newest version of that which we know.
    largest: bytes that it may have.
    infinite: whether NaN and Infinity, which are no JSON, may stand for numbers, as Python writes them.
    """
    content = read_bytes(path, name, largest)
    try:
        value = _parsed(content, infinite)
        if format is not None:
            _check_format(value, format, version)
        check_type(value, kind)
    except ValueError as error:
        raise ValueError(f"{name}: {path} is damaged, or is something else ({error})") from None
    return typing.cast(Kind, value)


def parse_json(content: bytes | str, kind: type[Kind], *, infinite: bool = False) -> Kind:
    """A JSON text as a value of this type; see `read_json`.

    >>> parse_json('{"a": [1, 2.5]}', dict[str, list[float]])
    {'a': [1, 2.5]}
    >>> parse_json('{"a": [1, "2"]}', dict[str, list[float]])
    Traceback (most recent call last):
    ValueError: a[1] is the text '2'; expected a number
    """
    value = _parsed(content, infinite)
    check_type(value, kind)
    return typing.cast(Kind, value)


def _parsed(content: bytes | str, infinite: bool) -> object:
    numbers: Callable[[str], float] = float if infinite else _finite
    try:
        value: object = json.loads(
            content, object_pairs_hook=_once, parse_constant=numbers, parse_float=numbers
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}") from None
    except (UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from None
    _check_depth(value)
    return value


def _check_format(value: object, format: str, version: int) -> None:
    check_type(value, _Header)
    header = typing.cast(_Header, value)
    if header["format"] != format:
        raise ValueError(f"its format is {header['format'][:60]!r}; expected {format!r}")
    if header["version"] > version:
        raise ValueError(
            f"it was written by a newer manyheads: version {header['version']}, this one reads {version}; "
            "update manyheads"
        )


class _Header(TypedDict):
    format: str
    version: int


def check_type(value: object, kind: Any, where: str = "") -> None:
    """Raise a ValueError that says where a value is not of a type.

    Parameters
    ----------
    value: what JSON gives: None, truth, numbers, texts, lists and objects.
    kind: None, bool, int, float, str, Literal, unions, list, dict, tuple, a TypedDict or a dataclass; every
        value is of any other type, such as object. Whole numbers fit 64 bits.
    where: the path to it from the top.

    >>> check_type({"steps": 3}, dict[str, int])
    >>> check_type([1, True], list[int], "shape")
    Traceback (most recent call last):
    ValueError: shape[1] is true or false; expected a whole number
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        _check_union(value, arguments, where)
    elif origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            raise _mismatch(value, " or ".join(map(repr, arguments)), where)
    elif typing.is_typeddict(kind):
        _check_object(value, kind, where)
    elif is_dataclass(kind):
        check_fields(value, typing.get_type_hints(kind), where)
    elif origin in (list, Sequence):
        items = _list(value, where)
        if set(map(type, items)) <= _QUICK.get(arguments[0], set()):  # long lists of numbers
            return
        for number, item in enumerate(items):
            check_type(item, arguments[0], f"{where}[{number}]")
    elif origin is tuple:
        is_variadic = len(arguments) == 2 and arguments[1] is Ellipsis
        items = _list(value, where, None if is_variadic else len(arguments))
        for number, item in enumerate(items):
            check_type(item, arguments[0 if is_variadic else number], f"{where}[{number}]")
    elif origin in (dict, Mapping):
        for key, item in _object(value, where).items():
            check_type(item, arguments[1], _join_path(where, key))
    else:
        _check_plain(value, kind, where)


_QUICK: dict[object, set[type]] = {float: {float}, float | None: {float, type(None)}, str: {str}}


def check_fields(values: object, kinds: Mapping[str, Any], where: str = "") -> None:
    """Raise a ValueError for the first value that is not of the type of its name; others may be there, too.

    >>> check_fields({"heads": "4", "other": None}, {"heads": int}, "task")
    Traceback (most recent call last):
    ValueError: task.heads is the text '4'; expected a whole number
    """
    for name, value in _object(values, where).items():
        if name in kinds:
            check_type(value, kinds[name], _join_path(where, name))


@contextmanager
def in_one_sentence(what: str) -> Iterator[None]:
    """Every error inside becomes a ValueError of one sentence: for code that uses a document whose types are
    right, but whose numbers may not fit each other.

    >>> with in_one_sentence("config.json: no model fits it"):
    ...     [][3]
    Traceback (most recent call last):
    ValueError: config.json: no model fits it (IndexError: list index out of range)
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system; Pillow raises others for an image that is cut off
        reason = first_line(error, 300) if type(error) is ValueError else describe_error(error, 300)
        raise ValueError(f"{what} ({reason})") from error


def _check_union(value: object, kinds: Sequence[Any], where: str) -> None:
    problems = []
    for kind in kinds:
        try:
            check_type(value, kind, where)
            return
        except ValueError as error:
            problems.append(error)
    if len(kinds) == 2 and type(None) in kinds:  # X or None: say what is wrong with it as an X
        raise problems[kinds[0] is type(None)]
    raise _mismatch(value, " or ".join(map(_describe_kind, kinds)), where)


def _check_object(value: object, kind: Any, where: str) -> None:
    fields = _object(value, where)
    hints = typing.get_type_hints(kind, include_extras=True)
    for key, hint in hints.items():
        optional = typing.get_origin(hint) is NotRequired
        if key in fields:
            check_type(fields[key], typing.get_args(hint)[0] if optional else hint, _join_path(where, key))
        elif not optional and key in kind.__required_keys__:
            raise ValueError(f"{_join_path(where, key)} is missing; expected {_describe_kind(hint)}")


def _check_plain(value: object, kind: object, where: str) -> None:
    if kind is None or kind is type(None):
        _demand(value is None, value, "null", where)
    elif kind is bool:
        _demand(isinstance(value, bool), value, "true or false", where)
    elif kind is int or kind is float:
        numbers = int if kind is int else int | float
        if not isinstance(value, numbers) or isinstance(value, bool):
            raise _mismatch(value, "a whole number" if kind is int else "a number", where)
        if isinstance(value, int) and not -_WHOLE <= value < _WHOLE:
            raise _mismatch(value, "one that fits 64 bits" if kind is int else "a smaller number", where)
    elif kind is str:
        _demand(isinstance(value, str), value, "a text", where)
    elif kind is dict:
        _object(value, where)
    elif kind is list:
        _list(value, where)


def _demand(fits: bool, value: object, expected: str, where: str) -> None:
    if not fits:
        raise _mismatch(value, expected, where)


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _mismatch(value, "an object", where)
    return value


def _list(value: object, where: str, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise _mismatch(value, "a list" if length is None else f"a list of {length}", where)
    return value


def _mismatch(value: object, expected: str, where: str) -> ValueError:
    description = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}.get(type(value))
    if isinstance(value, str) and len(value) <= 40:
        description = f"the text {value!r}"
    elif description is None:
        description = "null" if value is None else _number(value)
    return ValueError(f"{where or 'it'} is {description}; expected {expected}")


def _number(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 80:
        return "a number of many digits"
    return str(value)


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def _describe_kind(kind: Any) -> str:
    if typing.is_typeddict(kind) or (typing.get_origin(kind) or kind) in (dict, Mapping):
        return "an object"
    if typing.get_origin(kind) in (list, tuple, Sequence):
        return "a list"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return _NAMES.get(kind, "something else")


def _join_path(where: str, key: str) -> str:
    short = key if len(key) <= 60 else f"{key[:57]}..."
    return f"{where}.{short}" if where else short


def _once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different."""
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{_join_path('', key)} appears twice; expected it once")
        values[key] = value
    return values


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is not a number that can be kept")
    return value


def _check_depth(value: object) -> None:
    """Check that a value is not nested deeply, and that its texts can be encoded again."""
    layer: list[dict[str, object] | list[object]] = [[value]]
    for _ in range(DEEPEST):
        items = [item for node in layer for item in (node.values() if isinstance(node, dict) else node)]
        names = [name for node in layer if isinstance(node, dict) for name in node]
        for text in (item for item in [*names, *items] if isinstance(item, str)):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"the text {text[:40]!a} has half of a character") from None
        layer = [item for item in items if isinstance(item, dict | list)]
        if not layer:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST}")


def _error_text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
