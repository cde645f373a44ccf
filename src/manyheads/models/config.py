"""Models that manyheads trained: described in a config.json, from which they are built again.

``{"format": "manyheads", "class": "speech.ctc", "options": {...}, "task": {...}}``: a class of ours by its
registered name, what it is called with, and what it was trained for. A model that `build` made carries its
description through copies and cuts, so that a pruned model still knows its task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict, get_type_hints

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model
from torch import nn

from manyheads.common.errors import first_line
from manyheads.common.json_files import check_fields, in_one_sentence, parse_json, read_json
from manyheads.common.registry import registered
from manyheads.common.types import JsonObject
from manyheads.common.whole_files import write_whole
from manyheads.models.changes import Record, restructure
from manyheads.models.size_limits import no_larger_than, shapes

FORMAT = "manyheads"
CONFIG = "config.json"
RECORD = "manyheads.changes"  # in the metadata of weights whose heads changed in training


def build(description: Mapping[str, object]) -> nn.Module:
    """The model of a description, with new weights. Only classes that manyheads registered are built.

    Parameters
    ----------
    description: ``{"class": "language.next", "options": {...}}`` and more, which is kept as
        ``model.description``.

    Examples
    --------
    >>> options = {"d_model": 12, "heads": 3, "layers": 2, "vocabulary": 101}
    >>> model = build({"class": "language.next", "options": options})
    >>> type(model).__name__, model.description["options"]["heads"]
    ('Decoder', 3)
    """
    name, options = description.get("class"), description.get("options")
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ValueError(f"description: expected 'class' and 'options', got {sorted(description)}")
    try:
        kind = registered(name)
    except KeyError:
        raise ValueError(f"class: {name!r:.60} is not a model of this manyheads; update it") from None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ValueError(f"class: {name!r:.60} is not a model of this manyheads; update it")
    with in_one_sentence(f"options: {name} cannot be built with them"):
        check_fields(options, get_type_hints(kind.__init__), "options")
        model: nn.Module = kind(**options)
    model.description = dict(description)  # type: ignore[assignment]
    return model


class Training(TypedDict):
    """What a run was trained on; beside that in the file, the options of `train`."""

    data: str | None
    valid: str | None


# A model: a class by its registered name, and the arguments to make one.
ModelDescription = TypedDict("ModelDescription", {"class": str, "options": JsonObject})
# A config.json.
Description = TypedDict(
    "Description",
    {
        "format": str,
        "class": str,
        "options": JsonObject,
        "task": NotRequired[JsonObject],
        "training": NotRequired[Training],
    },
)


def _record(path: Path) -> str | None:
    """The record of heads that changed in training (`changes.record_of`), in a file of weights."""
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged ({first_line(error)})") from error
    return metadata.get(RECORD)


def read(folder: Path) -> Description | None:
    """The config.json in a folder; None when there is none, or one of another kind."""
    path = folder / CONFIG
    try:
        format = read_json(path, dict[str, object], "config").get("format")
    except ValueError:
        return None
    return read_json(path, Description, "config") if format == FORMAT else None


def write(model: nn.Module, folder: Path) -> None:
    """Write a model's description, if it has one."""
    description = getattr(model, "description", None)
    if description is not None:
        write_whole(folder / CONFIG, json.dumps({"format": FORMAT} | description, indent=1))


def load(folder: Path, description: Mapping[str, object]) -> nn.Module:
    """The model that train left in a folder, with its best weights."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise ValueError(
            f"{folder}: training was not evaluated yet, so there are no best weights; continue with --resume"
        )
    with no_larger_than(path):
        model = build(description)
    record = _record(path)
    if record is not None:
        with in_one_sentence(f"{path}: damaged, its changes do not fit"):
            model = restructure(model, parse_json(record.encode(), Record), shapes(path))
    try:
        load_model(model, path)
    except (RuntimeError, OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: damaged, or not the weights of this model ({first_line(error)})"
        ) from error
    return model.eval()
