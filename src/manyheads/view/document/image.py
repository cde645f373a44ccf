"""The image that a model reads, and the grid of patches that its heads attend to."""

from __future__ import annotations

import base64
import io
import math

import torch
from torch import Tensor, nn

from manyheads.common.nested_tensors import tensors_in
from manyheads.common.types import Batch
from manyheads.heads.pooled_maps import Seen
from manyheads.view.document.contract import Picture

# At most this many keys before the patches: a class token, registers.
_EXTRA_KEYS = 16
# Pixels of the longer side on the page.
_LARGEST = 448


def picture(batch: Batch, model: nn.Module, seen: Seen, processor: object = None) -> Picture | None:
    """The first image of a batch as a PNG, and which keys are its patches; None when there is none.

    >>> grid(197, 224, 224), grid(50, 224, 224), grid(7, 224, 224)
    ((14, 14, 1), (7, 7, 1), None)
    """
    pixels = next((x[0] for x in tensors_in(batch) if x.dim() == 4 and x.is_floating_point()), None)
    if pixels is None:
        return None
    if pixels.shape[0] not in (1, 3) and pixels.shape[-1] in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    square = [maps for maps in seen.maps if not maps.blocked and maps.queries == maps.keys]
    height, width = pixels.shape[1:]
    if callable(patches := getattr(model, "grid", None)):  # else words beside the patches would count, too
        square = [maps for maps in square if maps.keys == math.prod(patches(height, width))]
    cells = next((g for maps in square if (g := grid(maps.keys, height, width)) is not None), None)
    if pixels.shape[0] not in (1, 3) or cells is None:
        return None
    png = _png(_natural(pixels.float().cpu(), processor))
    if png is None:
        return None
    rows, columns, first = cells
    return {"png": f"data:image/png;base64,{png}", "rows": rows, "columns": columns, "first": first}


def grid(keys: int, height: int, width: int) -> tuple[int, int, int] | None:
    """Rows and columns of square patches that an image is cut into, and how many keys come before them."""
    for first in range(min(_EXTRA_KEYS, keys - 1) + 1):
        patches = keys - first
        rows = round(math.sqrt(patches * height / width))
        if rows > 1 and patches % rows == 0 and 4 * first <= patches:
            columns = patches // rows
            if columns > 1 and height * columns == width * rows and height >= rows:
                return rows, columns, first
    return None


def _natural(pixels: Tensor, processor: object) -> Tensor:
    """Colours between 0 and 1, as they were before the processor normalised them."""
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is not None and spread is not None and getattr(processor, "do_normalize", True):
        mean, spread = (torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1, 1) for x in (mean, spread))
        return (pixels * spread + mean).clamp(0.0, 1.0)
    low, high = pixels.amin(), pixels.amax()
    return pixels if low >= 0 and high <= 1 else (pixels - low) / (high - low).clamp(min=1e-12)


def _png(pixels: Tensor) -> str | None:
    """The bytes of a PNG in base64; None without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return None
    levels = (pixels.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    drawn = Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
    if max(drawn.size) > _LARGEST:
        drawn.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    drawn.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
