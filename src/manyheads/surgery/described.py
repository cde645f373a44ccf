"""Models that manyheads trained: described in a config.json, from which they are built again.

``{"format": "manyheads", "class": "package.module:Class", "options": {...}, "task": {...}}``: a class of
ours, what it is called with, and what it was trained for. A model that `build` made carries its description
through copies and cuts, so that a pruned model still knows its task.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

FORMAT = "manyheads"
CONFIG = "config.json"


def build(description: Mapping[str, Any]) -> nn.Module:
    """The model of a description, with new weights. Only classes inside manyheads are made.

    Parameters
    ----------
    description: ``{"class": "package.module:Class", "options": {...}}`` and more, which is kept as
        ``model.description``.

    Examples
    --------
    >>> options = {"d_model": 12, "heads": 3, "layers": 2, "vocabulary": 101}
    >>> model = build({"class": "manyheads.nn.transformers:Decoder", "options": options})
    >>> type(model).__name__, model.description["options"]["heads"]
    ('Decoder', 3)
    """
    name, options = description.get("class"), description.get("options")
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ValueError(f"description: expected 'class' and 'options', got {sorted(description)}")
    where, _, what = name.partition(":")
    if where.split(".")[0] != "manyheads" or not what.isidentifier():
        raise ValueError(f"class: expected one of manyheads ('manyheads.module:Class'), got {name!r}")
    try:
        made = getattr(importlib.import_module(where), what, None)
    except ImportError as error:
        raise ValueError(f"class: {name!r} is not in this manyheads ({error}); update it") from error
    if not isinstance(made, type) or not issubclass(made, nn.Module):
        raise ValueError(f"class: {name!r} is no model of this manyheads; update it")
    try:
        model: nn.Module = made(**options)
    except TypeError as error:
        raise ValueError(f"options: {name} cannot be made with them ({error})") from error
    model.description = dict(description)  # type: ignore[assignment]
    return model


def read(folder: Path) -> dict[str, Any] | None:
    """The description in a folder; None when there is none, or something else."""
    try:
        found = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def write(model: nn.Module, folder: Path) -> None:
    """Write a model's description, if it has one."""
    description = getattr(model, "description", None)
    if description is not None:
        (folder / CONFIG).write_text(json.dumps({"format": FORMAT} | description, indent=1), encoding="utf-8")


def load(folder: Path, description: Mapping[str, Any]) -> nn.Module:
    """The model that train left in a folder, with its best weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{folder}: training was not evaluated yet, so there are no best weights; go on with --resume"
        )
    model = build(description)
    try:
        load_model(model, path)
    except (RuntimeError, OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged, or not the weights of this model ({error})") from error
    return model.eval()
