"""Whether a value has a type of the page's contract: no key missing, none too many, every type right."""

import types
import typing
from typing import NotRequired


def mismatches(value: object, kind: typing.Any, at: str = "document") -> list[str]:
    """What is wrong with a value, a line each; nothing where it fits."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if typing.is_typeddict(kind):
        return _of_dict(value, kind, at)
    if origin in (typing.Union, types.UnionType):
        tried = [mismatches(value, arg, at) for arg in args]
        return [] if [] in tried else max(tried, key=len) if value is not None else [f"{at}: null"]
    if origin is typing.Literal:
        return [] if value in args else [f"{at}: {value!r} is none of {args}"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{at}: {type(value).__name__}, expected a list"]
        return [line for i, item in enumerate(value) for line in mismatches(item, args[0], f"{at}[{i}]")]
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            return [f"{at}: {value!r}, expected {len(args)} items"]
        pairs = zip(value, args, strict=True)
        return [line for i, pair in enumerate(pairs) for line in mismatches(*pair, f"{at}[{i}]")]
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, args[0]) for key in value):
            return [f"{at}: expected a dict"]
        return [line for key, item in value.items() for line in mismatches(item, args[1], f"{at}.{key}")]
    if kind is float:
        kind = (int, float)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return [] if fits else [f"{at}: {type(value).__name__}, expected {kind}"]


def _of_dict(value: object, kind: typing.Any, at: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{at}: {type(value).__name__}, expected {kind.__name__}"]
    hints = typing.get_type_hints(kind, include_extras=True)
    optional = {name for name, hint in hints.items() if typing.get_origin(hint) is NotRequired}
    lines = [f"{at}.{name}: too many" for name in value.keys() - hints.keys()]
    lines += [f"{at}.{name}: missing" for name in hints.keys() - optional - value.keys()]
    for name in hints.keys() & value.keys():
        hint = typing.get_args(hints[name])[0] if name in optional else hints[name]
        lines += mismatches(value[name], hint, f"{at}.{name}")
    return lines
