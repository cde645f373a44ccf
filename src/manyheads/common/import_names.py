"""Modules that a user names, imported from where the command runs."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def import_from_here(module: str) -> ModuleType:
    """A module of a package, or of the current folder, as ``python -m`` finds it.

    >>> import_from_here("math").__name__
    'math'
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(module)
