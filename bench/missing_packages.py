"""Packages that are not installed, replaced by what can be imported: enough for code that never runs."""

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (_Anything,), {})


class _Anything(metaclass=_Attributes):
    """What a package that is not here would have given: may be called, subclassed and used as a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (_Anything,), {})


class _Finder:
    """Finds empty modules for a package that is not installed and that the model itself does not use."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        sys.meta_path.append(_Finder(package))  # type: ignore[arg-type]
