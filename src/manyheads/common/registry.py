"""Names for what a lower room asks of a higher one.

A name stands for ``package.module:attribute``, which is imported when it is asked for. So registering costs
nothing, lower rooms import nothing from higher ones, and a module may move.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE: dict[str, str] = {}


def register(name: str, where: str) -> None:
    """Register a name for ``package.module:attribute``.

    >>> register("example", "math:sqrt")
    >>> registered("example")(9)
    3.0
    """
    _WHERE[name] = where


def registered(name: str) -> Any:
    """The object behind a name; a KeyError if nothing is registered under it."""
    module, _, attribute = _WHERE[name].partition(":")
    return getattr(import_module(module), attribute)
