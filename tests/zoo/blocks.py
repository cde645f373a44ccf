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


class Banded(Attention):
    """Each query reads the `reach` keys on either side, which `unfold` laid out for it."""

    reach = 2
    vague = True

    def true_hidden(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return (i - i[:, None]).abs() > self.reach

    def finish(self, truth: Truth) -> Truth:
        """Also as the band alone: (batch, heads, length, 2 reach + 1), the query in the middle."""
        length, n = truth.weights.shape[-1], self.reach
        wide = F.pad(truth.weights, (n, n))
        band = torch.stack([wide[:, :, i, i : i + 2 * n + 1] for i in range(length)], 2)
        counted = torch.ones(band.shape[0], length, dtype=torch.bool)
        truth.views.append(View(band, torch.full((length,), n), counted, first=False))
        return truth


class Unfolded(Banded):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        n = self.reach
        k, v = (F.pad(t, (0, 0, n, n)).unfold(2, 2 * n + 1, 1) for t in (k, v))  # (b, h, length, d, window)
        i = torch.arange(x.shape[1])[:, None] + torch.arange(-n, n + 1)
        outside = (i < 0) | (i >= x.shape[1])
        s = torch.einsum("bhld,bhldw->bhlw", q, k) * self.scale()
        a = s.masked_fill(outside, -torch.inf).softmax(-1)
        return self.o(torch.einsum("bhlw,bhldw->bhld", a, v).transpose(1, 2).flatten(2))


add(THEME, "sliding window by unfold", Unfolded)
add(THEME, "sliding window by unfold, window = length = heads + 1", Unfolded, size=(5, 5))


@zoo(THEME, "blocks that also read the one before", size=(3, 15), longer=(2, 35))
class OverlappingBlocks(Attention):
    """Local attention of chunks to themselves and the chunk before."""

    size = 5
    vague = True

    def true_hidden(self, x: Tensor) -> Tensor:
        chunk = torch.arange(x.shape[1]) // self.size
        return (chunk > chunk[:, None]) | (chunk < chunk[:, None] - 1)

    def forward(self, x: Tensor) -> Tensor:
        n = self.size
        q, k, v = (t.transpose(1, 2).unflatten(2, (-1, n)) for t in self.split(x))  # (b, h, chunks, n, d)
        k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], 3) for t in (k, v))
        s = q @ k.mT * self.scale()
        s[:, :, 0, :, :n] = -torch.inf
        return self.o((s.softmax(-1) @ v).flatten(2, 3).transpose(1, 2).flatten(2))

    def finish(self, truth: Truth) -> Truth:
        n, parts = self.size, []
        wide = F.pad(truth.weights, (n, 0))
        for start in range(0, truth.weights.shape[-1], n):
            parts.append(wide[:, :, start : start + n, start : start + 2 * n])
        stacked = torch.stack(parts, 1)  # (batch, chunks, heads, n, 2n)
        counted = torch.ones(stacked.shape[0] * stacked.shape[1], n, dtype=torch.bool)
        for w in (stacked.flatten(0, 1), stacked.transpose(0, 1).flatten(0, 1)):
            truth.views.append(View(w, torch.arange(n, 2 * n), counted, first=False))
        truth.outputs = None
        return truth


@zoo(THEME, "block-sparse: chosen blocks gathered", size=(3, 15), longer=None)
class Gathered(Attention):
    """Each block of queries reads two blocks of keys, chosen by a table: its own and another."""

    vague = True

    def build(self) -> None:
        self.table = nn.Buffer(torch.tensor([[0, 2], [1, 0], [2, 1]]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).unflatten(2, (-1, 5)) for t in self.split(x))
        k, v = (t[:, :, self.table].flatten(3, 4) for t in (k, v))  # (b, h, blocks, 10, d)
        a = (q @ k.mT * self.scale()).softmax(-1)
        return self.o((a @ v).flatten(2, 3).transpose(1, 2).flatten(2))

    def true_hidden(self, x: Tensor) -> Tensor:
        block = torch.arange(x.shape[1]) // 5
        return ~(self.table[block][..., None] == block).any(1)

    def finish(self, truth: Truth) -> Truth:
        parts = torch.stack([
            torch.cat([truth.weights[:, :, 5 * n : 5 * n + 5, 5 * m : 5 * m + 5] for m in row], -1)
            for n, row in enumerate(self.table.tolist())
        ], 1)  # fmt: skip
        counted = torch.ones(parts.shape[0] * 3, 5, dtype=torch.bool)
        for w in (parts.flatten(0, 1), parts.transpose(0, 1).flatten(0, 1)):
            truth.views.append(View(w, torch.arange(5), counted, first=False))
        truth.outputs = None
        return truth
