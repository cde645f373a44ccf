"""Plugins: what other packages add by entry points, loaded when it is first asked for.

A package declares them in its pyproject.toml, say ``[project.entry-points."manyheads.roles"]`` with
``quoting = "package.module:role"``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from manyheads.common.errors import describe_error

# What a group's objects are: a function that registers readers, a role, a method of importance, a task.
GROUPS = ("manyheads.attention", "manyheads.roles", "manyheads.importance", "manyheads.tasks")


@cache
def plugin_paths(group: str) -> MappingProxyType[str, str]:
    """Where the objects of a group are, ``package.module:attribute`` by name; nothing is imported.

    >>> dict(plugin_paths("manyheads.nothing"))
    {}
    """
    return MappingProxyType({point.name: point.value for point in entry_points(group=group)})


@cache
def load(group: str) -> MappingProxyType[str, Any]:
    """The objects of a group by name, each imported once. One that cannot be imported is named in a warning.

    >>> dict(load("manyheads.nothing"))
    {}
    """
    objects: dict[str, Any] = {}
    for point in entry_points(group=group):
        try:
            objects[point.name] = point.load()
        except (Exception, SystemExit) as error:
            _warn(group, f"{point.name} ({point.value})", error)
    return MappingProxyType(objects)


@cache
def call(group: str, function: Callable[[], object]) -> None:
    """Call a plugin that registers itself, once; an error is a warning."""
    try:
        function()
    except (Exception, SystemExit) as error:
        _warn(group, getattr(function, "__qualname__", repr(function)), error)


def _warn(group: str, name: str, error: BaseException) -> None:
    warnings.warn(
        f"manyheads: the plugin {name} of {group} was left out: {describe_error(error)}; update or uninstall "
        "the package it comes with",
        stacklevel=4,
    )
