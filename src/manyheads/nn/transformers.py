"""Transformers: `Encoder`, `Decoder` and `Seq2Seq`, for tokens (ids) or for vectors.

All three take the same options; those of `TransformerBlock` and `MultiHeadAttention` pass through:

    Encoder(256, heads=8, layers=4, vocabulary=32000, positions="rotary", norm="pre", window=128)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.nn import mask as masks
from manyheads.nn.blocks import TransformerBlock
from manyheads.nn.cache import KVCache
from manyheads.nn.mask import Mask
from manyheads.nn.stack import DecoderCache, Stack, join_masks

__all__ = ["Decoder", "Encoder", "Seq2Seq"]


class Encoder(Stack):
    """A stack of blocks in which every token attends to every other.

    Parameters
    ----------
    d_model, heads, layers
        Width of a token, attention heads per block, number of blocks.
    vocabulary
        Number of token ids; None for an encoder of vectors.
    positions
        "sinusoidal", "learned" (needs max_length), "rotary", "alibi", "none", or your own `Rotary`.
    max_length
        How many learned positions there are.
    block
        Options of `TransformerBlock` and, through it, of `MultiHeadAttention`.

    Examples
    --------
    >>> encoder = Encoder(12, heads=3, layers=2, vocabulary=101)
    >>> ids = torch.randint(101, (2, 7))
    >>> encoder(ids, lengths=torch.tensor([7, 4])).shape     # (batch, length, d_model)
    torch.Size([2, 7, 12])
    >>> _, hidden = encoder(ids, return_hidden=True)
    >>> len(hidden)                                          # before the first block and after each
    3
    >>> Encoder(12, heads=3, layers=2, positions="rotary")(torch.randn(2, 7, 12)).shape
    torch.Size([2, 7, 12])

    See Also
    --------
    Decoder, Seq2Seq : the other stacks.
    TransformerBlock : one layer.

    References
    ----------
    Devlin et al. 2019, BERT: pre-training of deep bidirectional transformers for language understanding.
    """

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Ids ``(batch, length)`` or vectors ``(batch, length, d_model)`` to ``(batch, length, d_model)``.

        Tokens at or past ``lengths (batch,)`` are padding: no token attends to them, and their output is
        meaningless. With ``return_hidden`` also the list of hidden states: the input of the first block, then
        the output of each block (before the last norm).
        """
        padding = None if lengths is None else masks.padding(lengths, queries=lengths)
        mask = join_masks(self.alibi, padding, mask)
        x = self.enter(x)
        hidden = [x] if return_hidden else []
        for block in self.blocks:
            x = block(x, mask=mask)
            if return_hidden:
                hidden.append(x)
        x = self.norm(x)
        return (x, hidden) if return_hidden else x


class Decoder(Stack):
    """A stack of blocks in which every token attends to itself and those before it: a language model.

    Parameters
    ----------
    d_model, heads, layers, vocabulary, positions, max_length, block
        As in `Encoder`; ``cross=True`` makes blocks that also attend to a context.
    tied
        Whether the output projection shares the embedding's weights.

    See Also
    --------
    generate : continue a prompt, greedily, by sampling or by beam search.
    Encoder, Seq2Seq : the other stacks.

    References
    ----------
    Radford et al. 2018, Improving language understanding by generative pre-training.
    Press and Wolf 2017, Using the output embedding to improve language models (tied).

    Examples
    --------
    >>> decoder = Decoder(12, heads=3, layers=2, vocabulary=101, positions="rotary")
    >>> ids = torch.randint(101, (2, 7))
    >>> logits = decoder(ids)                                # (batch, length, vocabulary)
    >>> logits.shape
    torch.Size([2, 7, 101])
    >>> cache = decoder.new_cache(max_length=7)
    >>> with torch.no_grad():
    ...     first = decoder(ids[:, :5], cache=cache)
    ...     rest = decoder(ids[:, 5:], cache=cache)
    >>> bool(torch.allclose(torch.cat([first, rest], dim=1), logits, atol=1e-4))
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        layers: int,
        *,
        vocabulary: int | None = None,
        tied: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(d_model, heads, layers, vocabulary=vocabulary, **options)
        self.output: nn.Linear | None = None
        if vocabulary is not None and not tied:
            self.output = nn.Linear(d_model, vocabulary, bias=False)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        context_lengths: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        cache: DecoderCache | None = None,
        last: bool = False,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Ids ``(batch, length)`` to logits ``(batch, length, vocabulary)``; or vectors to vectors.

        ``context (batch, keys, d_model)`` is what blocks with ``cross=True`` attend to, up to
        ``context_lengths``. With a ``cache``, x continues what the cache has read, and the context is the
        one the cache was made with. ``last=True`` gives the last token's logits only, ``(batch, 1,
        vocabulary)``. ``lengths`` and ``return_hidden`` as in `Encoder`.
        """
        padding: Mask | Tensor | None = None if lengths is None else masks.padding(lengths, queries=lengths)
        offset, left = 0, None
        if cache is not None:
            if lengths is not None or context is not None or context_lengths is not None:
                raise ValueError("cache: got lengths or a context too; give them to new_cache instead")
            offset, left, context_lengths = cache.length, cache.left, cache.context_lengths
            if left is not None:
                padding = torch.arange(offset + x.shape[1], device=left.device) >= left[:, None, None, None]
        context_mask = None if context_lengths is None else masks.padding(context_lengths)
        mask = join_masks(self.alibi, padding, mask)
        x = self.enter(x, offset, left)
        hidden = [x] if return_hidden else []
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                context,
                mask=mask,
                context_mask=context_mask,
                causal=True,
                cache=cache.blocks[i] if cache else None,
                context_cache=cache.contexts[i] if cache and cache.contexts else None,
            )
            if return_hidden:
                hidden.append(x)
        x = self.norm(x[:, -1:] if last else x)
        if self.embedding is not None:
            x = F.linear(x, self.embedding.weight if self.output is None else self.output.weight)
        return (x, hidden) if return_hidden else x

    def new_cache(
        self,
        max_length: int,
        context: Tensor | None = None,
        *,
        context_lengths: Tensor | None = None,
        left: Tensor | None = None,
    ) -> DecoderCache:
        """An empty cache for up to ``max_length`` tokens, to pass to each call as ``cache``.

        ``context`` is projected to keys and values here, once. ``left (batch,)`` is the number of padding
        tokens at the start of each row: prompts of different lengths end at the same position, so that all
        rows step together.
        """
        crosses = [block.cross_attention for block in self.blocks if isinstance(block, TransformerBlock)]
        if context is not None and None in crosses:
            raise ValueError("context: got one, but this decoder has no cross-attention (cross=False)")
        contexts = [cross.remember(context) for cross in crosses if cross is not None and context is not None]
        return DecoderCache(
            blocks=[KVCache(max_length) for _ in self.blocks],
            contexts=contexts,
            context_lengths=context_lengths,
            left=left,
        )


class Seq2Seq(nn.Module):
    """An encoder that reads the source and a decoder that writes the target, with cross-attention.

    Parameters
    ----------
    d_model, heads, layers
        Width of a token, attention heads per block, number of blocks in the encoder.
    decoder_layers
        Number of blocks in the decoder; as many as in the encoder by default.
    vocabulary
        Number of source ids; None for a source of vectors.
    target_vocabulary
        Number of target ids. By default that of the source; both sides then share one embedding.
    tied
        As in `Decoder`.
    options
        positions, max_length and the options of `TransformerBlock`, for both sides.

    Examples
    --------
    >>> model = Seq2Seq(12, heads=3, layers=2, vocabulary=101, target_vocabulary=53)
    >>> source, target = torch.randint(101, (2, 7)), torch.randint(53, (2, 5))
    >>> model(source, target, source_lengths=torch.tensor([7, 4])).shape      # (batch, length, vocabulary)
    torch.Size([2, 5, 53])

    See Also
    --------
    generate : write the target of a source.
    Encoder, Decoder : its two stacks.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        layers: int,
        *,
        decoder_layers: int | None = None,
        vocabulary: int | None = None,
        target_vocabulary: int | None = None,
        tied: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        shared = target_vocabulary is None
        self.encoder = Encoder(d_model, heads, layers, vocabulary=vocabulary, **options)
        self.decoder = Decoder(
            d_model,
            heads,
            layers if decoder_layers is None else decoder_layers,
            vocabulary=vocabulary if shared else target_vocabulary,
            tied=tied,
            cross=True,
            **options,
        )
        if shared:
            self.decoder.embedding = self.encoder.embedding

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits ``(batch, target length, vocabulary)`` for the token after each target token.

        Source and target are ids ``(batch, length)``, or vectors ``(batch, length, d_model)`` without a
        vocabulary. With ``return_hidden`` also the encoder's and the decoder's hidden states, as in
        `Encoder`.
        """
        lengths = {"lengths": target_lengths, "context_lengths": source_lengths}
        if not return_hidden:
            out: Tensor = self.decoder(target, self.encoder(source, lengths=source_lengths), **lengths)
            return out
        read, read_hidden = self.encoder(source, lengths=source_lengths, return_hidden=True)
        logits, written_hidden = self.decoder(target, read, **lengths, return_hidden=True)
        return logits, read_hidden, written_hidden
