"""One file for numbers, words and tensors inside dictionaries, lists and tuples: safetensors, no pickles."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from manyheads.common.whole_files import write_whole

_KEY = "manyheads"


def save_tensors(path: Path, document: object) -> None:
    """Write nested dictionaries (keys are texts, or tuples of texts), lists, tuples, plain values, tensors.

    The file is complete or absent. Tensors keep every bit, and so do floats.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors(Path(folder, "x"), {("a", "b"): torch.ones(2), "c": [1, (0.1, None)]})
    ...     load_tensors(Path(folder, "x"))
    {('a', 'b'): tensor([1., 1.]), 'c': [1, (0.1, None)]}
    """
    tensors: dict[str, Tensor] = {}
    words = json.dumps(_encode(document, tensors))
    write_whole(path, save(tensors, metadata={_KEY: words}))


def load_tensors(path: Path) -> object:
    """What `save_tensors` wrote; a ValueError for other files."""
    try:
        with safe_open(path, framework="pt") as file:
            words = (file.metadata() or {})[_KEY]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _decode(json.loads(words), tensors)
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or not a file that manyheads wrote ({error})") from None


def _encode(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"expected plain values and tensors, got {type(value).__name__}")


def _decode(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    raise ValueError(f"it holds a {kind!r}")
