"""Images from files as tensors of bytes, alone or as labelled datasets, and their patches."""

from __future__ import annotations

import io
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from manyheads.common.decompression import File, check_archive, content_of, decompressed, open_image
from manyheads.common.json_files import in_one_sentence
from manyheads.data.readers.records import IMAGES as IMAGE_SUFFIXES

if TYPE_CHECKING:
    from PIL.Image import Image

# What the parts of a dataset are called, in names of folders, files and arrays.
PARTS = {
    "train": ("train", "training"),
    "valid": ("val", "valid", "validation", "dev"),
    "test": ("test", "t10k", "testing"),
}
# What arrays of an .npz file without parts are called: images, and their classes.
_ARRAYS = (("x", "y"), ("images", "labels"), ("data", "target"))
_BYTES = 0x08  # the code for bytes in an IDX file

# Images (number, channels, height, width) as bytes, and the class of each.
Labelled = tuple[Tensor, list[str]]


def read_image(path: File, size: int | tuple[int, int] | None = None) -> Tensor:
    """An image file as bytes, ``(channels, height, width)``: one channel for shades of grey, else three.

    Parameters
    ----------
    path: a file that Pillow reads: PNG, JPEG and others.
    size: height and width, or one number for both: the image is scaled until it covers that, and cropped.
        Default: as it is.

    Transparent pixels become white.

    Examples
    --------
    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (7, 5), "red").save(f"{folder}/red.png")
    ...     pixels = read_image(f"{folder}/red.png", 3)
    >>> pixels.shape, pixels[:, 0, 0].tolist()
    (torch.Size([3, 3, 3]), [255, 0, 0])
    """
    with open_image(path, "data") as image:
        return to_pixels(image, size)


def to_pixels(image: Image, size: int | tuple[int, int] | None = None) -> Tensor:
    """An image of Pillow as bytes, ``(channels, height, width)``; see `read_image`.

    >>> from PIL import Image
    >>> to_pixels(Image.new("L", (7, 5), 255), (2, 3)).shape
    torch.Size([1, 2, 3])
    """
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, "white")
        image = Image.alpha_composite(white, clear).convert("L" if image.mode == "LA" else "RGB")
    elif image.mode.startswith("I") or image.mode == "F":  # more than 8 bits a pixel
        image = image.convert("F").point(lambda value: value / 257).convert("L")
    else:
        mode = "L" if image.mode in ("1", "L") else "RGB"
        image = image if image.mode == mode else image.convert(mode)
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        if image.size != (width, height):
            image = ImageOps.fit(image, (width, height))
    channels = len(image.getbands())
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


def patches(pixels: Tensor, side: int) -> Tensor:
    """Images cut into square patches, ``(batch, rows * columns, channels * side * side)``, row by row.

    Parameters
    ----------
    pixels: (batch, channels, height, width).
    side: of a patch, in pixels; height and width are multiples of it.

    >>> patches(torch.arange(16).view(1, 1, 4, 4), 2)
    tensor([[[ 0,  1,  4,  5],
             [ 2,  3,  6,  7],
             [ 8,  9, 12, 13],
             [10, 11, 14, 15]]])
    """
    batch, channels, height, width = pixels.shape
    if height % side or width % side:
        raise ValueError(
            f"patch: images of {height} x {width} pixels cannot be cut into patches of {side}; expected a "
            f"divisor of {math.gcd(height, width)}, or another size"
        )
    cut = pixels.view(batch, channels, height // side, side, width // side, side)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def read_set(data: str, part: str, size: int | None = None) -> Labelled | None:
    """The images of one part of a dataset, with their classes; None if the data has no such part.

    Parameters
    ----------
    data: a folder with a folder of images for each class, or with such a folder for each part (train, val,
        test); a folder with IDX files, compressed or not; one IDX file of images; or an .npz file.
    part: "train", "valid" or "test"; or "all" for data that has no parts.
    size: height and width that images in folders are scaled to. Default: as they are, all of one size.
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
    raise ValueError(f"data: {data} is neither an .npz nor an IDX file of images; expected one, or a folder")


def _folder(path: Path, part: str, size: int | None) -> Labelled | None:
    part_names = {name for names in PARTS.values() for name in names}
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    # a class may be called train, too: a part is what holds folders
    parts = [folder for folder in folders if folder.name.lower() in part_names and _has_folders(folder)]
    if parts:
        names = () if part == "all" else PARTS[part]
        chosen = [folder for folder in parts if folder.name.lower() in names]
        return _classes(chosen[0], size) if chosen else None
    return _classes(path, size) if part == "all" else None


def _has_folders(folder: Path) -> bool:
    return any(entry.is_dir() for entry in folder.iterdir())


def _classes(path: Path, size: int | None) -> Labelled:
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    files = [
        (file, folder.name)
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not files:
        raise ValueError(f"data: {path} holds no folder with images; expected a folder for each class")
    images: list[Tensor] = []
    for file, _ in files:
        pixels = read_image(file, size)
        if images and pixels.shape[1:] != images[0].shape[1:]:
            one, other = (f"{x.shape[1]} x {x.shape[2]}" for x in (pixels, images[0]))
            raise ValueError(
                f"data: {file} has {one} pixels, but {files[0][0]} has {other}; expected one size: --size "
                "scales all to one"
            )
        images.append(pixels)
    channels = max(len(pixels) for pixels in images)  # 3 if some are in colour
    return torch.stack([x.expand(channels, -1, -1) for x in images]), [name for _, name in files]


def _idx(path: Path) -> Labelled:
    """IDX files, the format of MNIST; the labels are in the file of the same name with labels for images."""
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    candidates = {name, name.removesuffix(".gz"), f"{name}.gz"}
    label_file = next((file for file in map(path.with_name, sorted(candidates)) if file.is_file()), None)
    if label_file is None:
        raise ValueError(f"data: {path} has no {name} beside it; expected the labels there")
    pixels, labels = _read_idx(path, 3), _read_idx(label_file, 1)
    if len(pixels) != len(labels):
        raise ValueError(
            f"data: {path} has {len(pixels):,} images and {label_file} {len(labels):,} labels; "
            "expected equal numbers"
        )
    return pixels.unsqueeze(1), [str(label) for label in labels.tolist()]


def _read_idx(path: Path, axes: int) -> Tensor:
    raw = decompressed(content_of(path, "data"), f"data: {path}")
    header = 4 + 4 * axes
    if len(raw) < header or raw[:4] != bytes([0, 0, _BYTES, axes]):
        raise ValueError(f"data: {path} is not an IDX file of bytes with {axes} axes; expected one")
    shape = struct.unpack(f">{axes}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise ValueError(
            f"data: {path} has {len(raw) - header:,} bytes after its header, which says {math.prod(shape):,}"
            "; it is cut off or damaged: get it again"
        )
    if not math.prod(shape):
        raise ValueError(f"data: {path} is empty; expected at least one image")
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8).view(shape)


def _npz(path: Path, part: str) -> Labelled | None:
    content = content_of(path, "data")
    check_archive(content, f"data: {path}")
    with (
        in_one_sentence(f"data: {path} is not a readable .npz file"),
        numpy.load(io.BytesIO(content), allow_pickle=False) as file,
    ):
        members = {name: file[name] for name in file.files}
    arrays = {name: array for name, array in members.items() if isinstance(array, numpy.ndarray)}
    names: list[tuple[str, str]] = list(_ARRAYS) if part == "all" else []
    for name in () if part == "all" else PARTS[part]:
        names += [(f"x_{name}", f"y_{name}"), (f"{name}_images", f"{name}_labels")]
    pair = next((pair for pair in names if set(pair) <= set(arrays)), None)
    if pair is None:
        parts = {name for every in PARTS.values() for one in every for name in (f"x_{one}", f"{one}_images")}
        if not (parts | {name for name, _ in _ARRAYS}) & set(arrays):
            raise ValueError(
                f"data: {path} holds {', '.join(arrays) or 'nothing'}; expected x_train and y_train, x_test "
                "and y_test, or images and labels"
            )
        return None
    with in_one_sentence(f"data: {pair[0]} in {path} is not an array of images"):
        pixels, labels = _levels(arrays[pair[0]], f"{pair[0]} in {path}"), arrays[pair[1]].reshape(-1)
    if len(pixels) != len(labels):
        raise ValueError(
            f"data: {path} has {len(pixels):,} images in {pair[0]} and {len(labels):,} labels in {pair[1]}"
            "; expected equal numbers"
        )
    return pixels, [str(label) for label in labels.tolist()]


def _levels(array: numpy.ndarray, name: str) -> Tensor:
    """An array of images as bytes (number, channels, height, width)."""
    pixels = torch.as_tensor(array.copy())
    if pixels.dim() == 4 and pixels.shape[1] not in (1, 3) and pixels.shape[3] in (1, 3):
        pixels = pixels.permute(0, 3, 1, 2)
    elif pixels.dim() == 3:
        pixels = pixels.unsqueeze(1)
    if pixels.dim() != 4 or pixels.shape[1] not in (1, 3) or not pixels.numel():
        raise ValueError(
            f"data: {name} is {tuple(array.shape)}; expected (images, height, width), with 1 or 3 channels "
            "before or after these"
        )
    if pixels.is_floating_point():
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):
            raise ValueError(f"data: {name} holds fractions outside 0 to 1; expected them, or bytes")
        pixels = (pixels * 255).round()
    elif pixels.dtype != torch.uint8 and not bool(((pixels >= 0) & (pixels <= 255)).all()):
        raise ValueError(f"data: {name} holds numbers outside 0 to 255; expected bytes")
    return pixels.to(torch.uint8).contiguous()


def _words(file: Path) -> list[str]:
    return re.split(r"[-_.]", file.name.lower())
