"""Pictures from files as tensors of bytes, alone or as labelled sets, and the patches they are read in."""

from __future__ import annotations

import io
import math
import re
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.common.decompression import check_archive, content_of, open_picture, unpacked
from manyheads.common.json_files import in_one_sentence
from manyheads.data.corpus import PICTURES

# What the parts of a data set are called, in names of folders, files and arrays.
PARTS = {
    "train": ("train", "training"),
    "valid": ("val", "valid", "validation", "dev"),
    "test": ("test", "t10k", "testing"),
}
# What arrays of an .npz file without parts are called: pictures, and their classes.
_ARRAYS = (("x", "y"), ("images", "labels"), ("data", "target"))
_BYTES = 0x08  # an IDX file's word for them

# Pictures (number, channels, height, width) as bytes, and the class of each.
Labelled = tuple[Tensor, list[str]]


def read_picture(path: Any, size: int | tuple[int, int] | None = None) -> Tensor:
    """A picture file as bytes, ``(channels, height, width)``: one channel for shades of grey, else three.

    Parameters
    ----------
    path: a file that Pillow reads: PNG, JPEG and others.
    size: height and width, or one number for both: the picture is scaled until it covers that, and what
        stands over is cut off. As it is without.

    What is transparent becomes white.

    Examples
    --------
    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (7, 5), "red").save(f"{folder}/red.png")
    ...     pixels = read_picture(f"{folder}/red.png", 3)
    >>> pixels.shape, pixels[:, 0, 0].tolist()
    (torch.Size([3, 3, 3]), [255, 0, 0])
    """
    with open_picture(path, "data") as picture:
        return to_pixels(picture, size)


def to_pixels(picture: Any, size: int | tuple[int, int] | None = None) -> Tensor:
    """A picture of Pillow as bytes, ``(channels, height, width)``; see `read_picture`.

    >>> from PIL import Image
    >>> to_pixels(Image.new("L", (7, 5), 255), (2, 3)).shape
    torch.Size([1, 2, 3])
    """
    from PIL import ImageOps

    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        clear = picture.convert("RGBA")
        white = _pillow().new("RGBA", clear.size, "white")
        picture = _pillow().alpha_composite(white, clear).convert("L" if picture.mode == "LA" else "RGB")
    elif picture.mode.startswith("I") or picture.mode == "F":  # more than 8 bits a pixel
        picture = picture.convert("F").point(lambda value: value / 257).convert("L")
    else:
        wanted = "L" if picture.mode in ("1", "L") else "RGB"
        picture = picture if picture.mode == wanted else picture.convert(wanted)
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        if picture.size != (width, height):
            picture = ImageOps.fit(picture, (width, height))
    channels = len(picture.getbands())
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(picture.height, picture.width, channels).permute(2, 0, 1).contiguous()


def patches(pixels: Tensor, side: int) -> Tensor:
    """Pictures cut into squares, ``(batch, rows * columns, channels * side * side)``, row by row.

    Parameters
    ----------
    pixels: (batch, channels, height, width).
    side: of a square, in pixels; height and width are multiples of it.

    >>> patches(torch.arange(16).view(1, 1, 4, 4), 2)
    tensor([[[ 0,  1,  4,  5],
             [ 2,  3,  6,  7],
             [ 8,  9, 12, 13],
             [10, 11, 14, 15]]])
    """
    batch, channels, height, width = pixels.shape
    if height % side or width % side:
        raise ValueError(
            f"patch: pictures of {height} x {width} pixels cannot be cut into squares of {side}; expected a "
            f"divisor of {math.gcd(height, width)}, or another size"
        )
    cut = pixels.view(batch, channels, height // side, side, width // side, side)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def read_set(data: str, part: str, size: int | None = None) -> Labelled | None:
    """The pictures of one part of a data set, with their classes; None if the data has no such part.

    Parameters
    ----------
    data: a folder with a folder of pictures for each class, or with such a folder for each part (train, val,
        test); a folder with IDX files, compressed or not; one IDX file of pictures; or an .npz file.
    part: "train", "valid" or "test"; or "all" for data that has no parts.
    size: height and width that pictures in folders are brought to; they must be of one size without it.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        idx = [file for file in sorted(path.iterdir()) if "idx" in file.name and "images" in _words(file)]
        if idx:
            names = () if part == "all" else PARTS[part]
            chosen = [file for file in idx if any(name in _words(file) for name in names)]
            return _idx(chosen[0]) if chosen else None
        return _folder(path, part, size)
    if not path.is_file():
        raise ValueError(
            f"data: there is no {data}; expected a folder with a folder for each class, IDX files, or a .npz "
            "file"
        )
    if path.suffix == ".npz":
        return _npz(path, part)
    if "idx" in path.name and "images" in _words(path):
        return _idx(path) if part == "all" else None
    raise ValueError(f"data: {data} is no .npz and no IDX file of images; expected one, or a folder")


def _folder(path: Path, part: str, size: int | None) -> Labelled | None:
    every = {name for names in PARTS.values() for name in names}
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    # a class may be called train, too: a part is what holds folders
    parts = [folder for folder in folders if folder.name.lower() in every and _has_folders(folder)]
    if parts:
        wanted = () if part == "all" else PARTS[part]
        chosen = [folder for folder in parts if folder.name.lower() in wanted]
        return _classes(chosen[0], size) if chosen else None
    return _classes(path, size) if part == "all" else None


def _has_folders(folder: Path) -> bool:
    return any(inside.is_dir() for inside in folder.iterdir())


def _classes(path: Path, size: int | None) -> Labelled:
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    files = [
        (file, folder.name)
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in PICTURES
    ]
    if not files:
        raise ValueError(f"data: {path} holds no folder with pictures; expected a folder for each class")
    found: list[Tensor] = []
    for file, _ in files:
        pixels = read_picture(file, size)
        if found and pixels.shape[1:] != found[0].shape[1:]:
            one, other = (f"{x.shape[1]} x {x.shape[2]}" for x in (pixels, found[0]))
            raise ValueError(
                f"data: {file} has {one} pixels, and {files[0][0]} has {other}; expected one size: --size "
                "brings all to it"
            )
        found.append(pixels)
    channels = max(len(pixels) for pixels in found)  # where some are in colour, the others are grey in colour
    return torch.stack([x.expand(channels, -1, -1) for x in found]), [name for _, name in files]


def _idx(path: Path) -> Labelled:
    """IDX files, as MNIST comes in; the labels are in the file of the same name with labels for images."""
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    others = {name, name.removesuffix(".gz"), f"{name}.gz"}
    beside = next((file for file in map(path.with_name, sorted(others)) if file.is_file()), None)
    if beside is None:
        raise ValueError(f"data: {path} has no {name} beside it; expected the labels there")
    pixels, labels = _read_idx(path, 3), _read_idx(beside, 1)
    if len(pixels) != len(labels):
        raise ValueError(
            f"data: {path} has {len(pixels):,} pictures and {beside} {len(labels):,} labels; expected as many"
        )
    return pixels.unsqueeze(1), [str(label) for label in labels.tolist()]


def _read_idx(path: Path, axes: int) -> Tensor:
    raw = unpacked(content_of(path, "data"), f"data: {path}")
    header = 4 + 4 * axes
    if len(raw) < header or raw[:4] != bytes([0, 0, _BYTES, axes]):
        raise ValueError(f"data: {path} is no IDX file of bytes with {axes} axes; expected one")
    shape = struct.unpack(f">{axes}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise ValueError(
            f"data: {path} has {len(raw) - header:,} bytes after its header, which says {math.prod(shape):,}"
            "; it is cut off or damaged: get it again"
        )
    if not math.prod(shape):
        raise ValueError(f"data: {path} is empty; expected at least one picture")
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8).view(shape)


def _npz(path: Path, part: str) -> Labelled | None:
    import numpy

    content = content_of(path, "data")
    check_archive(content, f"data: {path}")
    with (
        in_one_sentence(f"data: {path} is no .npz file that can be read"),
        numpy.load(io.BytesIO(content), allow_pickle=False) as file,
    ):
        read = {name: file[name] for name in file.files}
    arrays = {name: array for name, array in read.items() if isinstance(array, numpy.ndarray)}
    wanted: list[tuple[str, str]] = list(_ARRAYS) if part == "all" else []
    for name in () if part == "all" else PARTS[part]:
        wanted += [(f"x_{name}", f"y_{name}"), (f"{name}_images", f"{name}_labels")]
    pair = next((pair for pair in wanted if set(pair) <= set(arrays)), None)
    if pair is None:
        known = {name for names in PARTS.values() for one in names for name in (f"x_{one}", f"{one}_images")}
        if not (known | {name for name, _ in _ARRAYS}) & set(arrays):
            raise ValueError(
                f"data: {path} holds {', '.join(arrays) or 'nothing'}; expected x_train and y_train, x_test "
                "and y_test, or images and labels"
            )
        return None
    with in_one_sentence(f"data: {pair[0]} in {path} is no array of pictures"):
        pixels, labels = _levels(arrays[pair[0]], f"{pair[0]} in {path}"), arrays[pair[1]].reshape(-1)
    if len(pixels) != len(labels):
        raise ValueError(
            f"data: {path} has {len(pixels):,} pictures in {pair[0]} and {len(labels):,} labels in {pair[1]}"
            "; expected as many"
        )
    return pixels, [str(label) for label in labels.tolist()]


def _levels(array: Any, what: str) -> Tensor:
    """An array of pictures as bytes (number, channels, height, width)."""
    pixels = torch.as_tensor(array.copy())
    if pixels.dim() == 4 and pixels.shape[1] not in (1, 3) and pixels.shape[3] in (1, 3):
        pixels = pixels.permute(0, 3, 1, 2)
    elif pixels.dim() == 3:
        pixels = pixels.unsqueeze(1)
    if pixels.dim() != 4 or pixels.shape[1] not in (1, 3) or not pixels.numel():
        raise ValueError(
            f"data: {what} is {tuple(array.shape)}; expected (pictures, height, width), with 1 or 3 channels "
            "before or after these"
        )
    if pixels.is_floating_point():
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):
            raise ValueError(f"data: {what} holds fractions outside 0 to 1; expected them, or bytes")
        pixels = (pixels * 255).round()
    elif pixels.dtype != torch.uint8 and not bool(((pixels >= 0) & (pixels <= 255)).all()):
        raise ValueError(f"data: {what} holds numbers outside 0 to 255; expected bytes")
    return pixels.to(torch.uint8).contiguous()


def _words(file: Path) -> list[str]:
    return re.split(r"[-_.]", file.name.lower())


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("pictures need Pillow: pip install 'manyheads[train]'") from None
    return Image
