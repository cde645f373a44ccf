"""Models that caption images: cross-attention to patches, or patches and words in one stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.heads.watch import watch
from manyheads.nn.cache import KVCache
from manyheads.nn.generate import generate
from manyheads.nn.transformers import Encoder, Seq2Seq
from manyheads.tasks.image_stems import make_stem


def ink(pictures: Tensor) -> Tensor:
    """Images inverted, so that the background, mostly white, is zero.

    >>> ink(torch.ones(1, 3, 2, 2)).sum().item()
    0.0
    """
    return 1 - pictures


class Eye(Encoder):
    """An encoder of images: every patch attends to every other.

    Examples
    --------
    >>> eye = Eye(4, d_model=12, heads=3, layers=2)
    >>> eye(torch.rand(2, 3, 8, 16)).shape                                # (batch, patches, d_model)
    torch.Size([2, 8, 12])
    """

    def __init__(self, patch: int, *, stem: str = "convolutions", **options: Any) -> None:
        super().__init__(**options)
        self.stem = make_stem(stem, 3, self.d_model, patch)

    def enter(self, x: Tensor, offset: int = 0, left: Tensor | None = None) -> Tensor:
        """Images ``(batch, 3, height, width)`` to what the first block reads: a vector for each patch."""
        return super().enter(self.stem(ink(x)), offset, left)


class Describer(Seq2Seq):
    """An `Eye` as encoder, and a decoder that writes the caption, with cross-attention to the patches.

    Examples
    --------
    >>> model = Describer(4, vocabulary=53, d_model=12, heads=3, layers=2)
    >>> pictures, ids = torch.rand(2, 3, 8, 16), torch.randint(53, (2, 5))
    >>> model(pictures, ids).shape                                        # (batch, length, vocabulary)
    torch.Size([2, 5, 53])
    >>> model.write(pictures, torch.tensor([1, 2]), end=0, most=7).shape[0]
    2
    """

    def __init__(
        self,
        patch: int,
        vocabulary: int,
        *,
        stem: str = "convolutions",
        decoder_layers: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(target_vocabulary=vocabulary, decoder_layers=decoder_layers, **options)
        self.encoder = Eye(patch, stem=stem, **options)

    def write(self, pictures: Tensor, first: Tensor, end: int, most: int) -> Tensor:
        """Captions ``(batch, length)`` that begin with ``first (batch,)``, padded with the end."""
        written = torch.full((len(pictures), most), end, device=pictures.device)
        for start in first.unique().tolist():  # one language after the other
            rows = first == start
            ids = generate(self, pictures[rows], start=start, end=end, new_tokens=most)
            written[rows, : ids.shape[1]] = ids
        return written


class Stream(nn.Module):
    """Patches and words in one self-attention: patches see patches, words see patches and earlier words.

    Parameters
    ----------
    patch: side of a patch, in pixels.
    vocabulary: number of tokens.
    stem: how a patch becomes a token, by its name in `image_stems`.
    options: those of `Encoder`.

    Examples
    --------
    >>> model = Stream(4, vocabulary=53, d_model=12, heads=3, layers=2)
    >>> pictures, ids = torch.rand(2, 3, 8, 16), torch.randint(53, (2, 5))
    >>> model(pictures, ids, lengths=torch.tensor([5, 3])).shape          # (batch, length, vocabulary)
    torch.Size([2, 5, 53])
    >>> model.write(pictures, torch.tensor([1, 2]), end=0, most=7).shape[0]
    2
    """

    def __init__(self, patch: int, vocabulary: int, *, stem: str = "convolutions", **options: Any) -> None:
        super().__init__()
        self.patch = patch
        self.stack = Encoder(**options)
        self.stem = make_stem(stem, 3, self.stack.d_model, patch)
        self.embedding = nn.Embedding(vocabulary, self.stack.d_model)
        nn.init.normal_(self.embedding.weight, std=self.stack.d_model**-0.5)

    def forward(self, pictures: Tensor, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Images ``(batch, 3, height, width)`` and ids ``(batch, length)`` to logits of the next ids."""
        tokens = self.stem(ink(pictures))
        patches = tokens.shape[1]
        x = torch.cat([tokens, self.embedding(ids)], 1)
        position = torch.arange(x.shape[1], device=x.device)
        mask = (position < patches) | (position <= position[:, None])  # (queries, keys)
        hidden = self.stack(x, lengths=None if lengths is None else lengths + patches, mask=mask)
        return F.linear(hidden[:, patches:], self.embedding.weight)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the patches of an image."""
        return height // self.patch, width // self.patch

    @torch.no_grad()
    def write(self, pictures: Tensor, first: Tensor, end: int, most: int) -> Tensor:
        """Captions ``(batch, length)`` that begin with ``first (batch,)``, padded with the end."""
        x = self.stem(ink(pictures))
        caches = [KVCache(x.shape[1] + most) for _ in self.stack.blocks]
        self._step(x, caches)
        token, ended = first[:, None], torch.zeros_like(first, dtype=torch.bool)
        written: list[Tensor] = []
        while len(written) < most and not bool(ended.all()):
            hidden = self._step(self.embedding(token), caches)
            token = F.linear(hidden, self.embedding.weight)[:, -1].argmax(-1, keepdim=True)
            token = token.masked_fill(ended[:, None], end)
            ended = ended | (token[:, 0] == end)
            written.append(token)
        return torch.cat(written, 1)

    def _step(self, x: Tensor, caches: list[KVCache]) -> Tensor:
        """The hidden states of the next tokens of the stream, which see all that the caches hold."""
        x = self.stack.enter(x, offset=caches[0].length)
        for block, cache in zip(self.stack.blocks, caches, strict=True):
            x = block(x, mask=self.stack.alibi, cache=cache)
        out: Tensor = self.stack.norm(x)
        return out


def picture_shares(model: Stream, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """The share of each head's attention, from words, that goes to the image: ``(layers, heads)``.

    Parameters
    ----------
    model: a `Stream` whose layers all have the same number of heads.
    batches: as `Picturebook.inputs` gives them.

    Examples
    --------
    >>> model = Stream(4, vocabulary=53, d_model=12, heads=3, layers=2)
    >>> batch = {"pictures": torch.rand(2, 3, 8, 16), "ids": torch.randint(53, (2, 5))}
    >>> shares = picture_shares(model, [batch])
    >>> shares.shape, bool(((shares > 0) & (shares < 1)).all())
    (torch.Size([2, 3]), True)
    """
    with torch.no_grad(), watch(model, segments=("picture", "text"), profiles=True) as seen:
        for batch in batches:
            patches = math.prod(model.grid(*batch["pictures"].shape[2:]))
            kinds = torch.cat([torch.zeros(patches), torch.ones(batch["ids"].shape[1])]).long()
            seen.segment(kinds.expand(len(batch["ids"]), -1))
            model(**batch)
    layers = [seen.table.profiles[site.name]["picture"][:, :, patches:].sum(-1) for site in seen.sites]
    return torch.stack([attention / count for count, attention in layers])
