"""The safetensors files of a model that is too large to open: read and written one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.common.json_files import read_json
from manyheads.common.types import JsonObject

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# The dtypes that a safetensors file names.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_PART = 2**24  # bytes


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """The tensors of all safetensors files in a folder, by name; none is read before it is asked for.

    Examples
    --------
    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"weight": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    ...     checkpoint = Checkpoint(Path(folder))
    ...     checkpoint.entries["weight"].shape, checkpoint.read("weight").sum()
    ((2, 3), tensor(6.))
    """

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, Entry] = {}
        for path in _files(folder):
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        part = file.get_slice(name)
                        if part.get_dtype() not in DTYPES:
                            raise ValueError(
                                f"{path}: {name} is of the dtype {part.get_dtype()}, unknown here"
                            )
                        shape = tuple(part.get_shape())
                        self.entries[name] = Entry(path, shape, DTYPES[part.get_dtype()])
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: damaged, or not weights ({error}); get the model again") from error

    def read(self, name: str) -> Tensor:
        """A tensor. Its file is closed again, so that no page of it stays in memory."""
        with safe_open(self.entries[name].file, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def read_parts(self, name: str) -> Iterator[Tensor]:
        """A tensor in parts, some rows at a time.

        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"weight": torch.ones(2**13, 2**10)}, f"{folder}/model.safetensors")
        ...     [part.shape[0] for part in Checkpoint(Path(folder)).read_parts("weight")]
        [4096, 4096]
        """
        file, shape, dtype = self.entries[name]
        if bytes_of(shape, dtype) <= _PART:
            yield self.read(name)
            return
        rows = max(_PART // bytes_of(shape[1:], dtype), 1)
        for start in range(0, shape[0], rows):
            with safe_open(file, "pt") as opened:
                yield opened.get_slice(name)[start : start + rows]

    def numbers(self, name: str, positions: Iterable[list[int]]) -> list[object]:
        """Some numbers of a tensor, without the rest."""
        with safe_open(self.entries[name].file, "pt") as file:
            part = file.get_slice(name)
            if not self.entries[name].shape:
                return [self.read(name).item() for _ in positions]
            return [part[tuple(slice(i, i + 1) for i in position)].item() for position in positions]


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the one, or those that its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"MODEL: {folder} has neither {WEIGHTS} nor {INDEX}; expected a folder with weights as "
            "safetensors (save_pretrained writes them)"
        )
    index = read_json(folder / INDEX, JsonObject, INDEX)
    names = sorted(set((index.get("weight_map") or {}).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder}: {name} is missing; the folder is incomplete, get the model again")
    return [folder / name for name in names]


def bytes_of(shape: Iterable[int], dtype: torch.dtype) -> int:
    """The size of a tensor in a file.

    >>> bytes_of((2, 3), torch.bfloat16)
    12
    """
    return math.prod(shape) * dtype.itemsize


def write_tensors(
    path: Path,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Iterable[Tensor]]],
) -> None:
    """Write a safetensors file of this layout, in that order; tensors come in parts, some rows at a time.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     write_tensors(path, {"a": ((3,), torch.bfloat16)}, [("a", [torch.ones(3, dtype=torch.bfloat16)])])
    ...     load_file(path)
    {'a': tensor([1., 1., 1.], dtype=torch.bfloat16)}
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in layout.items():
        start, end = end, end + bytes_of(shape, dtype)
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    expected = iter(layout.items())
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, parts in tensors:
            of_layout = next(expected, ("", None))
            written = _write_parts(file, parts)
            if of_layout != (name, written):
                raise ValueError(f"{path}: {name} is {written}, expected {of_layout}")
        if next(expected, None) is not None:
            raise ValueError(f"{path}: some tensors of its layout were not written")


def _write_parts(file: BinaryIO, parts: Iterable[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """Write the parts of a tensor one after the other. Returns its shape and dtype."""
    rows = 0
    shape: tuple[int, ...] = ()
    dtype = torch.float32
    for part in parts:
        numbers: Any = part.contiguous().reshape(-1).view(torch.uint8).numpy()
        file.write(memoryview(numbers))
        rows, shape, dtype = rows + (len(part) if part.dim() else 0), tuple(part.shape), part.dtype
        del part, numbers  # before the next one is read
    return (rows, *shape[1:]) if shape else (), dtype
