"""Checkpoints: safetensors and JSON in a folder that is there whole or not at all. No pickles.

Each is written beside the others under another name, and renamed when it is complete and on the disk; only
then is an older one removed. Whatever happens in between, the last good one stays.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

KEEP = 2
_VERSION = 1


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Parameters
    ----------
    folder: where the checkpoints of a run are.
    step: how many updates were made.
    tensors: files of tensors by name.
    state: all else, as JSON can keep it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(Path(folder), 3, {"model": {"weight": torch.ones(2)}}, {"best": 0.5})
    ...     state, tensors = load(path)
    >>> path.name, state["step"], tensors["model"]["weight"]
    ('step-00000003', 3, tensor([1., 1.]))
    """
    path = folder / f"step-{step:08}"
    if path.exists():
        return path
    unfinished = folder / f".{path.name}.{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        for name, values in tensors.items():
            write(unfinished / f"{name}.safetensors", to_bytes(_savable(values)))
        document = {"format": "manyheads checkpoint", "version": _VERSION, "step": step} | state
        write(unfinished / "state.json", json.dumps(document, indent=1).encode())
        os.rename(unfinished, path)
        _to_disk(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in found(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def tidy(folder: Path) -> None:
    """Remove what killed runs left unfinished."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def load(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The state and the tensors of a checkpoint; a ValueError names the one that is damaged."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        if state["format"] != "manyheads checkpoint" or state["version"] > _VERSION:
            raise ValueError(f"format {state['format']}, version {state['version']}")
        tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"{path}: damaged, or no checkpoint of this manyheads ({type(error).__name__}: {error}); "
            "remove it to go on from the one before"
        ) from error
    return state, tensors


def write(path: Path, content: bytes) -> None:
    """Write a file beside, see it on the disk, and move it to its place."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. One that has several names has its first.

    >>> list(weights(nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    kept = set(model.state_dict())
    named |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: value.detach() for name, value in named.items()}


@torch.no_grad()
def put(values: Mapping[str, Tensor], model: nn.Module) -> None:
    """Set a model's weights, in place.

    >>> model = nn.Linear(2, 1)
    >>> put({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, model)
    >>> model(torch.ones(1, 2)).item()
    2.0
    """
    own = weights(model)
    if different := sorted(set(own) ^ set(values)):
        raise ValueError(f"weights: {different[0]!r} is in the model or in the file, expected in both")
    for name, value in own.items():
        if value.shape != values[name].shape:
            shapes = f"{tuple(values[name].shape)} in the file, {tuple(value.shape)} in the model"
            raise ValueError(f"weights: {name!r} has the shape {shapes}, expected the same")
        value.copy_(values[name])


def _savable(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous().cpu() for name, value in values.items()}


def model_bytes(values: Mapping[str, Tensor]) -> bytes:
    """Weights as the content of a model.safetensors."""
    content: bytes = to_bytes(_savable(values), metadata={"format": "pt"})
    return content


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a model.safetensors."""
    try:
        values: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: missing or damaged ({error}); expected weights") from error
    return values


def _to_disk(folder: Path) -> None:
    """A renaming is on the disk when its folder is."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
