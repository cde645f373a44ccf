"""Checkpoints: safetensors and JSON in a folder that is complete or absent. No pickles.

Each is written beside the others under another name, and renamed when it is complete and on the disk; only
then is an older one removed. Whatever happens in between, the last good one stays.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.common.json_files import read_json, regular_file
from manyheads.common.types import JsonObject
from manyheads.common.whole_files import whole_folder, write_whole
from manyheads.models.changes import Record
from manyheads.models.config import RECORD

KEEP = 2
_FORMAT, _VERSION = "manyheads checkpoint", 1
_NAME = re.compile(r"step-\d{8,}")


class State(TypedDict):
    """What a checkpoint holds besides tensors.

    ``step`` is the number of updates, ``worse`` the number of evaluations since the best, ``data`` the hashes
    of the data, ``scaler`` the state of the gradient scaler, ``health`` and ``dynamic`` those of
    `HeadHealth` and `DynamicHeads`, and ``changes`` the record of heads that changed.
    """

    step: int
    best: float | None
    best_step: int
    worse: int
    data: list[str]
    scaler: JsonObject | None
    health: NotRequired[JsonObject | None]
    dynamic: NotRequired[JsonObject]
    changes: NotRequired[Record | None]


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: State) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Parameters
    ----------
    folder: the folder of the checkpoints of a run.
    tensors: files of tensors by name.
    state: everything else, as JSON.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = {"step": 3, "best": 0.5, "best_step": 2, "worse": 1, "data": [], "scaler": None}
    ...     path = save(Path(folder), {"model": {"weight": torch.ones(2)}}, state)
    ...     state, tensors = load(path)
    >>> path.name, state["step"], tensors["model"]["weight"]
    ('step-00000003', 3, tensor([1., 1.]))
    """
    path = folder / f"step-{state['step']:08}"
    if path.exists():
        return path
    with whole_folder(path) as unfinished:
        for name, values in tensors.items():
            write_whole(unfinished / f"{name}.safetensors", to_bytes(_savable(values)))
        document = {"format": _FORMAT, "version": _VERSION, **state}
        write_whole(unfinished / "state.json", json.dumps(document, indent=1))
    for old in list_checkpoints(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True)


def load(path: Path) -> tuple[State, dict[str, dict[str, Tensor]]]:
    """The state and the tensors of a checkpoint; a ValueError names the one that is damaged."""
    try:
        state = read_json(
            path / "state.json", State, "state", format=_FORMAT, version=_VERSION, infinite=True
        )
        if path.name != f"step-{state['step']:08}" or min(state["best_step"], state["worse"]) < 0:
            raise ValueError(f"it says that it is of step {state['step']}")
        tensors = {file.stem: read_weights(file) for file in sorted(path.glob("*.safetensors"))}
    except ValueError as error:
        raise ValueError(
            f"{path}: damaged, or not a checkpoint of this manyheads ({error}); remove it to continue from "
            "the one before"
        ) from error
    return state, tensors


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one with several names by its first.

    >>> list(weights(nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict())
    named |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: value.detach() for name, value in named.items()}


@torch.no_grad()
def set_weights(values: Mapping[str, Tensor], model: nn.Module) -> None:
    """Set a model's weights, in place.

    >>> model = nn.Linear(2, 1)
    >>> set_weights({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, model)
    >>> model(torch.ones(1, 2)).item()
    2.0
    """
    current = weights(model)
    if different := sorted(set(current) ^ set(values)):
        raise ValueError(f"weights: {different[0]!r} is in the model or in the file, expected in both")
    for name, value in current.items():
        if value.shape != values[name].shape:
            shapes = f"{tuple(values[name].shape)} in the file, {tuple(value.shape)} in the model"
            raise ValueError(f"weights: {name!r} has the shape {shapes}, expected the same")
        if value.dtype != values[name].dtype:
            kinds = f"{values[name].dtype} in the file, {value.dtype} in the model"
            raise ValueError(f"weights: {name!r} is {kinds}, expected the same")
        value.copy_(values[name])


def moments(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What AdamW remembers of every parameter, under names such as ``exp_avg/weight``.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> sorted(moments(optimizer, model))
    ['exp_avg/weight', 'exp_avg_sq/weight', 'step/weight']
    """
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def set_moments(values: Mapping[str, Tensor], optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimiser remember what `moments` gave."""
    for name, parameter in model.named_parameters():
        state = {
            key: values[f"{key}/{name}"]
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{key}/{name}" in values
        }
        for key, value in state.items():
            if value.shape != (() if key == "step" else parameter.shape) or not value.is_floating_point():
                raise ValueError(f"{key} of {name} is {value.dtype} {tuple(value.shape)}")
        if state:
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def _savable(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous().cpu() for name, value in values.items()}


def model_bytes(values: Mapping[str, Tensor], changes: Record | None = None) -> bytes:
    """Weights as the content of a model.safetensors, with the record of heads that changed in training."""
    metadata = {"format": "pt"} | ({} if changes is None else {RECORD: json.dumps(changes)})
    content: bytes = to_bytes(_savable(values), metadata=metadata)
    return content


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a model.safetensors."""
    try:
        values: dict[str, Tensor] = load_file(regular_file(path, "weights"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: missing or damaged ({error}); expected weights") from error
    return values
