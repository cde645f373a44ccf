"""The picture that a model saw, and the grid of patches that its heads attend to."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.heads.pooled_maps import Seen
from manyheads.view.document.sample import tensors

# Keys that are no patches: a class token, registers.
_EXTRA = 16
# A picture is shown no larger than this.
_LARGEST = 448


def picture(batch: Any, model: nn.Module, seen: Seen, processor: Any = None) -> dict[str, Any] | None:
    """The first picture of a batch as a PNG, and which keys are its patches; None when there is none.

    >>> grid(197, 224, 224), grid(50, 224, 224), grid(7, 224, 224)
    ((14, 14, 1), (7, 7, 1), None)
    """
    pixels = next((x[0] for x in tensors(batch) if x.dim() == 4 and x.is_floating_point()), None)
    if pixels is None:
        return None
    if pixels.shape[0] not in (1, 3) and pixels.shape[-1] in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    whole = [maps for maps in seen.maps if not maps.blocked and maps.queries == maps.keys]
    height, width = pixels.shape[1:]
    if callable(cut := getattr(model, "grid", None)):  # else words beside the patches would count as some
        whole = [maps for maps in whole if maps.keys == math.prod(cut(height, width))]
    found = next((g for maps in whole if (g := grid(maps.keys, height, width)) is not None), None)
    if pixels.shape[0] not in (1, 3) or found is None:
        return None
    png = _png(_natural(pixels.float().cpu(), processor))
    if png is None:
        return None
    rows, columns, first = found
    return {"png": f"data:image/png;base64,{png}", "rows": rows, "columns": columns, "first": first}


def grid(keys: int, height: int, width: int) -> tuple[int, int, int] | None:
    """Rows and columns of square patches that a picture is cut into, and how many keys come before them."""
    for first in range(min(_EXTRA, keys - 1) + 1):
        patches = keys - first
        rows = round(math.sqrt(patches * height / width))
        if rows > 1 and patches % rows == 0 and 4 * first <= patches:
            columns = patches // rows
            if columns > 1 and height * columns == width * rows and height >= rows:
                return rows, columns, first
    return None


def _natural(pixels: Tensor, processor: Any) -> Tensor:
    """Colours between 0 and 1, as they were before the processor normalised them."""
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is not None and spread is not None and getattr(processor, "do_normalize", True):
        mean, spread = (torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1, 1) for x in (mean, spread))
        return (pixels * spread + mean).clamp(0.0, 1.0)
    low, high = pixels.amin(), pixels.amax()
    return pixels if low >= 0 and high <= 1 else (pixels - low) / (high - low).clamp(min=1e-12)


def _png(pixels: Tensor) -> str | None:
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
