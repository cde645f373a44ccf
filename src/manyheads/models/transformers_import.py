"""Tells transformers about models whose heads were changed, whenever it is imported.

`import manyheads` must not import transformers, which takes seconds. So the registration waits for the one
module of transformers that it is about: `transformers_loading` is imported right after it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_AWAITED = "transformers.quantizers.auto"
_LOADING = "manyheads.models.transformers_loading"


class _Finder(MetaPathFinder):
    """Finds one module as Python would, and has `transformers_loading` imported after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(_LOADING)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Let ``from_pretrained`` load cut models, now if transformers is imported, or once it is."""
    if _AWAITED in sys.modules:
        importlib.import_module(_LOADING)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
