"""Stems: how an image becomes tokens, one for each patch."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.data.readers.image import patches

STEMS = ("convolutions", "patches")


def make_stem(kind: str, channels: int, d_model: int, patch: int) -> nn.Module:
    """A stem by its name: images ``(batch, channels, height, width)`` to ``(batch, tokens, d_model)``.

    >>> make_stem("patches", 3, d_model=12, patch=4)(torch.rand(2, 3, 8, 16)).shape
    torch.Size([2, 8, 12])
    """
    check_stem(kind, patch)
    return (Convolutions if kind == "convolutions" else Patches)(channels, d_model, patch)


def check_stem(kind: str, patch: int) -> None:
    """Raise a ValueError for a name that is no stem, or a patch size that it cannot have."""
    if kind not in STEMS:
        raise ValueError(f"stem: expected {' or '.join(STEMS)}, got {kind!r}")
    if patch < 1:
        raise ValueError(f"patch: expected 1 or more, got {patch}")
    if kind == "convolutions" and (patch < 2 or patch & (patch - 1)):
        raise ValueError(f"patch: expected 2, 4, 8 ... with convolutions, got {patch}")


class Patches(nn.Module):
    """Patches, each by one linear layer.

    >>> Patches(3, d_model=12, patch=4)(torch.rand(2, 3, 8, 16)).shape      # (batch, tokens, d_model)
    torch.Size([2, 8, 12])
    """

    def __init__(self, channels: int, d_model: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        numbers = channels * patch * patch
        self.project = nn.Linear(numbers, d_model)
        # as large as positions and embeddings are, or colours would drown them
        nn.init.normal_(self.project.weight, std=(2 / (numbers * d_model)) ** 0.5)
        nn.init.zeros_(self.project.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Images ``(batch, channels, height, width)`` to tokens, row by row."""
        out: Tensor = self.project(patches(pixels, self.patch))
        return out


class Convolutions(nn.Module):
    """Convolutions and pooling that halve the image until a patch is one token.

    A token thus sees the pixels around its patch, and the stem is equivariant to shifts.

    >>> Convolutions(3, 8, patch=4)(torch.rand(2, 3, 16, 12)).shape         # (batch, tokens, d_model)
    torch.Size([2, 12, 8])
    """

    def __init__(self, channels: int, d_model: int, patch: int) -> None:
        super().__init__()
        halvings = patch.bit_length() - 1
        widths = [channels, *(d_model >> (halvings - 1 - i) for i in range(halvings))]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))

    def forward(self, pixels: Tensor) -> Tensor:
        """Images ``(batch, channels, height, width)`` to tokens, row by row."""
        # channels last: pooling is faster, and tokens lie in memory as they are read
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            pixels = F.max_pool2d(F.relu(layer(pixels)), 2)
        return pixels.flatten(2).transpose(1, 2)
