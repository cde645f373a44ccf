"""The common part of Encoder and Decoder: embeddings, positions, blocks, the last norm, the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn import mask as masks
from manyheads.nn.blocks import TransformerBlock, make_norm
from manyheads.nn.cache import KVCache
from manyheads.nn.mask import Mask
from manyheads.nn.positions import LearnedPositions, Rotary, SinusoidalPositions
from manyheads.nn.residual import Dropout

POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "none")


class Stack(nn.Module):
    """Embeddings and positions, blocks, and the last norm of pre-norm; see `Encoder` for the options."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        layers: int,
        *,
        vocabulary: int | None = None,
        positions: str | Rotary = "sinusoidal",
        max_length: int | None = None,
        **block: Any,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers: expected at least 1, got {layers}")
        if not isinstance(positions, Rotary) and positions not in POSITIONS:
            names = ", ".join(POSITIONS)
            raise ValueError(f"positions: expected a Rotary or one of {names}, got {positions!r}")
        if (positions == "learned") != (max_length is not None):
            raise ValueError(
                f"max_length: expected a number with positions='learned' and none otherwise, "
                f"got max_length={max_length} with positions={positions!r}"
            )
        self.d_model = d_model
        self.max_length = max_length
        self.embedding: nn.Embedding | None = None
        if vocabulary is not None:
            if vocabulary < 1:
                raise ValueError(f"vocabulary: expected at least 1, got {vocabulary}")
            self.embedding = nn.Embedding(vocabulary, d_model)
            nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.positions: SinusoidalPositions | LearnedPositions | None = None
        if positions == "sinusoidal":
            self.positions = SinusoidalPositions(d_model)
        elif positions == "learned" and max_length is not None:
            self.positions = LearnedPositions(max_length, d_model)
        elif positions == "rotary":
            d_key = block.get("d_key") or d_model // heads
            positions = Rotary(d_key - d_key % 2)
        if isinstance(positions, Rotary):
            block["rotary"] = positions
        self.alibi = masks.alibi(heads) if positions == "alibi" else None
        self.dropout = Dropout(block.get("dropout", 0.0))
        self.blocks = nn.ModuleList(TransformerBlock(d_model, heads, **block) for _ in range(layers))
        self.norm: nn.Module = nn.Identity()
        if block.get("norm", "pre") == "pre":
            rms_norm, eps = block.get("rms_norm", False), block.get("norm_eps", 1e-5)
            self.norm = make_norm(d_model, rms_norm, eps, block.get("bias", True))

    def enter(self, x: Tensor, offset: int = 0, left: Tensor | None = None) -> Tensor:
        """Ids (batch, length), or vectors (batch, length, d_model), to what the first block reads."""
        if self.embedding is not None:
            x = embed(self.embedding, x)
        elif not x.is_floating_point():
            raise TypeError(f"x: expected vectors (no vocabulary was given), got {x.dtype}")
        elif x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x: expected (batch, length, {self.d_model}), got {tuple(x.shape)}")
        return self.put_in_order(x, offset, left)

    def put_in_order(self, x: Tensor, offset: int = 0, left: Tensor | None = None) -> Tensor:
        """Embedded tokens (batch, length, d_model) with their positions, if these are added, and dropout."""
        if self.positions is not None:
            if self.embedding is not None and isinstance(self.positions, SinusoidalPositions):
                x = x * self.d_model**0.5  # as large as the sines that are added, as in the paper
            x = self.positions(x, offset, left)
        out: Tensor = self.dropout(x)
        return out


def embed(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """The vectors of ids (batch, length); raises for ids that are not in the vocabulary."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids: expected int64 or int32 (a vocabulary was given), got {ids.dtype}")
    if ids.dim() != 2:
        raise ValueError(f"ids: expected (batch, length), got {tuple(ids.shape)}")
    # only where reading values costs no waiting and no graph break; elsewhere the embedding itself raises
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= embedding.num_embeddings:
            raise ValueError(
                f"ids: expected 0 to {embedding.num_embeddings - 1} (vocabulary), got {low} to {high}"
            )
    out: Tensor = embedding(ids)
    return out


def join_masks(*parts: Mask | Tensor | None) -> Mask | None:
    """All of these masks together; None when there are none."""
    whole_mask = None
    for part in parts:
        if part is not None:
            whole_mask = masks.as_mask(part) if whole_mask is None else whole_mask & part
    return whole_mask


@dataclass
class DecoderCache:
    """The cache of a `Decoder` between steps: made by `Decoder.new_cache`, changed by each call.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder
    >>> decoder = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> cache = decoder.new_cache(max_length=11)
    >>> with torch.no_grad():
    ...     _ = decoder(torch.randint(101, (2, 7)), cache=cache)      # ids (batch, length)
    ...     cache.reorder(torch.tensor([1, 1, 0]))                    # the second row twice, then the first
    ...     decoder(torch.randint(101, (3, 1)), cache=cache).shape    # (batch, length, vocabulary)
    torch.Size([3, 1, 101])
    >>> cache.length
    8

    See Also
    --------
    KVCache : the cache of one attention module.
    generate : generation with a cache.

    References
    ----------
    Shazeer 2019, Fast transformer decoding: one write-head is all you need.
    """

    blocks: list[KVCache]
    contexts: list[KVCache]  # one per block, or none without a context
    context_lengths: Tensor | None  # (batch,)
    left: Tensor | None  # (batch,): how many places at the start of each row are padding

    @property
    def length(self) -> int:
        """How many tokens have been read, padding included."""
        return self.blocks[0].length

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; rows may repeat."""
        for cache in self.blocks + self.contexts:
            cache.reorder(rows)
        if self.left is not None:
            self.left = self.left[rows]
        if self.context_lengths is not None:
            self.context_lengths = self.context_lengths[rows.to(self.context_lengths.device)]
