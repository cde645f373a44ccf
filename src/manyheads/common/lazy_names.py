"""Names that are imported when they are first used, so that ``import manyheads`` is fast."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType

from manyheads.common.extras import missing_extra


def submodules(package: str) -> Callable[[str], ModuleType]:
    """The ``__getattr__`` of a package whose modules resolve without an import statement.

    >>> find = submodules("importlib")
    >>> find("resources").__name__
    'importlib.resources'
    >>> find("resource")
    Traceback (most recent call last):
    AttributeError: module 'importlib' has no attribute 'resource'
    """

    def find(name: str) -> ModuleType:
        path = f"{package}.{name}"
        try:
            return _import(path)
        except ModuleNotFoundError as error:
            if sentence := missing_extra(error):
                raise ImportError(sentence, name=error.name) from error
            if error.name != path:
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return find


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of a package that offers names from other modules.

    Parameters
    ----------
    package: its name.
    homes: the module of each name.

    >>> find = attributes("package", {"sqrt": "math"})
    >>> find("sqrt")(9)
    3.0
    >>> find("cube")
    Traceback (most recent call last):
    AttributeError: module 'package' has no attribute 'cube'
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(_import(homes[name]), name)
        except ModuleNotFoundError as error:
            if sentence := missing_extra(error):
                raise ImportError(sentence, name=error.name) from error
            raise

    return find


def _import(path: str) -> ModuleType:
    """Import a module; Python's random numbers stay as they are: rich draws some then."""
    state = random.getstate()
    try:
        return import_module(path)
    finally:
        random.setstate(state)
