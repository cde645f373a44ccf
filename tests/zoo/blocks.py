"""Attention inside pieces: blocks, windows, rows and columns of images, frames, bands."""

from __future__ import annotations

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Silent, Truth, View
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "blocks"


class InPieces(Attention):
    """Attention inside pieces of the sequence; `pieces(length)` gives each token's piece.

    The truth is the whole matrix with zeros elsewhere; the pieces one by one are the same in another layout,
    with samples outside or inside.
    """

    vague = True

    def pieces(self, length: int) -> Tensor:
        raise NotImplementedError

    def true_hidden(self, x: Tensor) -> Tensor:
        piece = self.pieces(x.shape[1])
        return piece != piece[:, None]

    def order(self, length: int) -> Tensor:
        """(pieces, size) the tokens of each piece."""
        piece = self.pieces(length)
        return torch.stack([(piece == n).nonzero().flatten() for n in piece.unique()])

    def finish(self, truth: Truth) -> Truth:
        order = self.order(truth.weights.shape[-1])
        size = order.shape[1]
        parts = torch.stack(
            [truth.weights[:, :, o][..., o] for o in order], 1
        )  # (batch, pieces, heads, size, size)
        outer, inner = parts.flatten(0, 1), parts.transpose(0, 1).flatten(0, 1)
        counted = torch.ones(len(outer), size, dtype=torch.bool)
        truth.views += [View(w, torch.arange(size), counted, first=False) for w in (outer, inner)]
        truth.outputs = None
        return truth


class Chunks(InPieces):
    """Blocks of `size` tokens one after the other."""

    size = 5

    def pieces(self, length: int) -> Tensor:
        return torch.arange(length) // self.size


@zoo(THEME, "chunks folded into the batch", size=(3, 15))
class ChunksInBatch(Chunks):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.reshape(-1, self.size, self.heads, self.width).transpose(1, 2) for t in self.split(x))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)
        return self.o(o)


class ChunksAxis(Chunks):
    """(batch, heads, chunks, size, width)"""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).unflatten(2, (-1, self.size)) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).flatten(2, 3).transpose(1, 2).flatten(2))


add(THEME, "chunks as an axis after the heads", ChunksAxis, size=(3, 15))
add(THEME, "chunks as an axis after the heads, chunks = heads = batch", ChunksAxis, size=(4, 20))


@zoo(THEME, "chunks as an axis before the heads, chunks = heads", size=(3, 20))
class ChunksFirst(Chunks):
    """(batch, chunks, heads, size, width)"""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (-1, self.size)).transpose(2, 3) for t in self.split(x))
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).transpose(2, 3).flatten(1, 2).flatten(2))


@zoo(THEME, "chunks in a loop", size=(3, 15), longer=(2, 35))
class ChunkLoop(Chunks):
    def forward(self, x: Tensor) -> Tensor:
        out = []
        for part in x.split(self.size, 1):
            q, k, v = (t.transpose(1, 2) for t in self.split(part))
            out.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.o(torch.cat(out, 1))


class Image(InPieces):
    """Tokens are the pixels of an image `high` x `wide`, row by row."""

    high, wide = 4, 6

    def place(self, length: int) -> tuple[Tensor, Tensor]:
        i = torch.arange(length)
        return i // self.wide, i % self.wide


@zoo(THEME, "windows of an image (Swin), channel-last", size=(2, 24), longer=(3, 24))
class Windows(Image):
    def pieces(self, length: int) -> Tensor:
        row, column = self.place(length)
        return row // 2 * 3 + column // 2

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        image = x.view(batch, 2, 2, 3, 2, -1).transpose(2, 3).reshape(batch * 6, 4, -1)  # windows of 2 x 2
        q, k, v = (t.transpose(1, 2) for t in self.split(image))
        a = (q * self.scale() @ k.transpose(-2, -1)).softmax(-1)
        o = self.o((a @ v).transpose(1, 2).reshape(batch * 6, 4, -1))
        return o.view(batch, 2, 3, 2, 2, -1).transpose(2, 3).reshape(x.shape)


class ShiftedWindows(Windows):
    """Rolled by one before and back after, with a learned bias of each head."""

    def build(self) -> None:
        self.bias = nn.Parameter(torch.randn(self.heads, 4, 4))

    def pieces(self, length: int) -> Tensor:
        row, column = self.place(length)
        return (row - 1) % 4 // 2 * 3 + (column - 1) % 6 // 2

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        image = x.view(batch, 4, 6, -1).roll((-1, -1), (1, 2))
        image = image.reshape(batch, 2, 2, 3, 2, -1).transpose(2, 3).reshape(batch * 6, 4, -1)
        q, k, v = (t.transpose(1, 2) for t in self.split(image))
        a = (q * self.scale() @ k.mT + self.bias.unsqueeze(0)).softmax(-1)
        o = self.o((a @ v).transpose(1, 2).reshape(batch * 6, 4, -1))
        o = o.view(batch, 2, 3, 2, 2, -1).transpose(2, 3).reshape(batch, 4, 6, -1)
        return o.roll((1, 1), (1, 2)).flatten(1, 2)

    def order(self, length: int) -> Tensor:
        image = torch.arange(length).view(4, 6).roll((-1, -1), (0, 1))
        return image.view(2, 2, 3, 2).transpose(1, 2).reshape(6, 4)

    def true_scores(self, x: Tensor) -> Tensor:
        scores = super().true_scores(x)
        for piece in self.order(x.shape[1]):
            scores[:, :, piece[:, None], piece] += self.bias
        return scores


add(THEME, "shifted windows with a bias (Swin)", ShiftedWindows, size=(2, 24), longer=(3, 24))


class Rows(Image):
    def pieces(self, length: int) -> Tensor:
        return self.place(length)[0]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(1, (self.high, self.wide)).transpose(2, 3) for t in self.split(x)
        )  # (b, rows, h, wide, d)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2).flatten(2))


class Columns(Image):
    def pieces(self, length: int) -> Tensor:
        return self.place(length)[1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (self.high, self.wide)) for t in self.split(x))
        a = torch.einsum("bxyhd,bzyhd->bhyxz", q, k).mul(self.scale()).softmax(-1)
        return self.o(torch.einsum("bhyxz,bzyhd->bxyhd", a, v).flatten(1, 2).flatten(2))


class Divided(nn.Module):
    """Two modules: over the frames of each place, then over the places of each frame (TimeSformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Columns(), Rows()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(x)
        return x + self.space(x)

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        out, first = self.time.plain(x, {0: silent.get(0, frozenset())})
        x = x + out
        out, second = self.space.plain(x, {0: silent.get(1, frozenset())})
        first[0].path, second[0].path = "attn.time", "attn.space"
        return x + out, [*first, *second]

    def example(self, batch: int, length: int) -> Tensor:
        return self.time.example(batch, length)


add(THEME, "rows of an image (axial)", Rows, size=(3, 24), longer=None)
add(THEME, "rows of an image, batch = rows = heads", Rows, size=(4, 24), longer=None)
add(THEME, "columns of an image by einsum", Columns, size=(3, 24), longer=None)
add(THEME, "columns of an image, batch = heads", Columns, size=(4, 24), longer=None)
add(THEME, "divided space and time", Divided, size=(2, 24), longer=None)
