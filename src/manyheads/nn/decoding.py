"""The step of a `Decoder` from one token to the next, without its modules: what generation repeats.

A step multiplies one vector (or a few) by every matrix of the model. What it costs is reading the matrices,
and the Python between them. So, once per call of `generate`: the projections of a block that read the same
vector become one matrix; matrices with more rows than columns are laid out so that the longer axis is
contiguous, which the processor reads up to 1.6 times as fast; norms and activations are called as functions.

The hypotheses of a beam search are queries of one sequence: their prompt is in memory once, what they wrote
lies side by side, and a mask says which of it is whose. Nothing is copied when hypotheses change places.

`steps_of` returns None for models that are not made of our modules alone, or that are being observed (hooks,
torch function modes): these are run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode

from manyheads.nn import mask as masks
from manyheads.nn.blocks import FeedForward, TransformerBlock
from manyheads.nn.cache import KVCache
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import LearnedPositions, Rotary, SinusoidalPositions
from manyheads.nn.residual import Dropout
from manyheads.nn.stack import DecoderCache
from manyheads.nn.transformers import Decoder

# Laying out the weights pays from this number of new tokens on.
FEWEST = 16
# Up to this many rows, a wide matrix times a few columns is faster than a few rows times the matrix; with few
# inputs up to some more.
ROWS, ROWS_OF_FEW_INPUTS, FEW_INPUTS = 6, 8, 512

Function = Callable[[Tensor], Tensor]
_MODULES = (
    Decoder, TransformerBlock, MultiHeadAttention, FeedForward, Dropout, Rotary, LearnedPositions,
    SinusoidalPositions, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.ModuleList, nn.Identity,
)  # fmt: skip


def steps_of(decoder: Decoder, cache: DecoderCache, rows: int, beams: int) -> Steps | None:
    """The steps of a decoder for ``rows`` sequences of ``beams`` hypotheses each, or None."""
    parameters = list(decoder.parameters())
    dtype = parameters[0].dtype
    applies = (
        not torch_modules._has_any_global_hook()
        and torch._C._len_torch_function_stack() == 0
        and _get_current_dispatch_mode() is None
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and decoder.embedding is not None
        and decoder.alibi is None
        and dtype in (torch.float32, torch.float64)
        and all(p.dtype == dtype and p.device.type == "cpu" and type(p) is nn.Parameter for p in parameters)
        and all(type(part) is KVCache for part in cache.blocks)
        and all(map(_is_unmodified, decoder.modules()))
        and all(map(_is_regular, decoder.blocks))
    )
    return Steps(decoder, cache, rows, beams) if applies else None


def _is_unmodified(module: nn.Module) -> bool:
    """Whether this is one of our modules, with no hook on it and nothing put in the place of its forward."""
    return (
        type(module) in _MODULES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
    )


def _is_regular(block: nn.Module) -> bool:
    """Whether a block's heads are of equal sizes, with nothing but causality to restrict them."""
    if not isinstance(block, TransformerBlock):
        return False
    parts = [part for part in (block.attention, block.cross_attention) if part is not None]
    return all(
        part.window is None
        and part.chunk is None
        and part.kernel in ("auto", "fused")
        and part.query.out_features == part.heads * part.d_key
        and part.key.out_features == part.kv_heads * part.d_key
        and part.value.out_features == part.kv_heads * part.d_value
        for part in parts
    )


class Steps:
    """A decoder that reads a prompt, then one token of each hypothesis at a time; see `steps_of`."""

    def __init__(self, decoder: Decoder, cache: DecoderCache, rows: int, beams: int) -> None:
        assert decoder.embedding is not None
        self.decoder, self.cache, self.beams = decoder, cache, beams
        self.length = cache.length  # tokens read, of each hypothesis
        count = rows * beams
        blocks = cast(list[TransformerBlock], list(decoder.blocks))
        contexts: Sequence[KVCache | None] = cache.contexts or [None] * len(blocks)
        self.layers = [
            _Layer(block, keys, context, count, cache.context_lengths)
            for block, keys, context in zip(blocks, cache.blocks, contexts, strict=True)
        ]
        self.embedding = decoder.embedding.weight
        unembedding = self.embedding if decoder.output is None else decoder.output.weight
        self.logits = _projection([unembedding], [None], count)
        self.visible: Tensor | None = None  # (rows, 1, beams, keys): which keys are whose

    def prompt(self, ids: Tensor) -> Tensor:
        """Read ids (rows, length); the logits of the next token, (rows, vocabulary)."""
        decoder, cache, left, length = self.decoder, self.cache, self.cache.left, ids.shape[1]
        visible = None if left is None else torch.arange(length) >= left[:, None, None, None]
        context_mask = None if cache.context_lengths is None else masks.padding(cache.context_lengths)
        x = decoder.enter(ids, 0, left)
        for layer in self.layers[:-1]:
            caches = {"cache": layer.cache, "context_cache": layer.context_cache}
            x = layer.block(x, mask=visible, context_mask=context_mask, causal=True, **caches)
        # the last block's output is needed for the last token only, and of the others their keys and values
        last = self.layers[-1]
        if length > 1:
            normed = last.norm_before(x[:, :-1], last.block.attention_norm)
            last.cache.append(*last.block.attention.keys_values(normed, None, 0))
        x = last.step(x[:, -1], length - 1, 1, visible, {})
        self.length = length
        if self.beams > 1 and visible is None:
            visible = torch.ones(len(ids), 1, 1, length, dtype=torch.bool)
        self.visible = None if visible is None else visible.expand(-1, -1, self.beams, -1)
        return self.logits(decoder.norm(x))

    def token(self, ids: Tensor, parents: Tensor | None = None) -> Tensor:
        """Read one token of each hypothesis, (rows * beams, 1), that continues ``parents (rows, beams)``.

        Returns the logits of the next one, (rows * beams, vocabulary).
        """
        self._see(parents)
        left = self.cache.left
        if left is not None and self.beams > 1:
            left = left.repeat_interleave(self.beams)
        x = self.decoder.put_in_order(F.embedding(ids, self.embedding), self.length, left)[:, 0]
        turns: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            x = layer.step(x, self.length, self.beams, self.visible, turns)
        self.length += 1
        return self.logits(self.decoder.norm(x))

    def _see(self, parents: Tensor | None) -> None:
        """Each hypothesis sees what its parent saw, and the token that it reads now."""
        if self.visible is None:
            return
        if parents is not None:
            self.visible = self.visible.gather(2, parents[:, None, :, None].expand(self.visible.shape))
        rows = self.visible.shape[0]
        itself = torch.eye(self.beams, dtype=torch.bool).expand(rows, 1, -1, -1)
        self.visible = torch.cat((self.visible, itself), dim=3)


class _Layer:
    """One block: its matrices laid out, its caches, and the step."""

    def __init__(
        self,
        block: TransformerBlock,
        cache: KVCache,
        context: KVCache | None,
        rows: int,
        context_lengths: Tensor | None,
    ) -> None:
        self.block, self.cache, self.context_cache = block, cache, context
        attention = block.attention
        self.inputs = _merge_projections([attention.query, attention.key, attention.value], rows)
        self.widths = [attention.query.out_features, attention.key.out_features, attention.value.out_features]
        self.shapes = (
            [attention.heads, attention.kv_heads, attention.kv_heads],
            [attention.d_key, attention.d_key, attention.d_value],
        )
        self.output = _merge_projections([attention.output], rows)
        self.context: tuple[Tensor, Tensor] | None = None
        self.context_mask: Tensor | None = None
        if block.cross_attention is not None and context is not None:
            self.context = context.held()
            self.cross_query = _merge_projections([block.cross_attention.query], rows)
            self.cross_output = _merge_projections([block.cross_attention.output], rows)
            if context_lengths is not None:
                keys = torch.arange(self.context[0].shape[2])
                self.context_mask = keys < context_lengths[:, None, None, None]
        feed = block.feed_forward
        self.up = _merge_projections([feed.up] if feed.gate is None else [feed.gate, feed.up], rows)
        self.down = _merge_projections([feed.down], rows)

    def step(
        self,
        x: Tensor,
        position: int,
        beams: int,
        visible: Tensor | None,
        turns: dict[int, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """``x (rows * beams, d_model)`` at ``position`` to the same shape; grows the cache by ``beams``."""
        block, attention = self.block, self.block.attention
        y = self.norm_before(x, block.attention_norm)
        q, k, v = (
            part.view(-1, beams, heads, width)
            for part, heads, width in zip(self.inputs(y).split(self.widths, 1), *self.shapes, strict=True)
        )
        if attention.query_norm is not None and attention.key_norm is not None:
            q, k = attention.query_norm(q), attention.key_norm(k)
        if attention.rotary is not None:
            if id(attention.rotary) not in turns:
                turns[id(attention.rotary)] = attention.rotary.turns(position, 1, x)
            q, k = (attention.rotary.turned(part, *turns[id(attention.rotary)]) for part in (q, k))
        keys, values = self.cache.append(k.transpose(1, 2), v.transpose(1, 2))
        out = _attend(q, keys, values, visible, attention.d_key**-0.5)
        x = self.norm_after(x, self.output(out), block.attention_norm)
        if block.cross_attention is not None and self.context is not None:
            y = self.norm_before(x, block.cross_norm)
            cross = block.cross_attention
            q = self.cross_query(y).view(-1, beams, cross.heads, cross.d_key)
            if cross.query_norm is not None:
                q = cross.query_norm(q)
            out = _attend(q, *self.context, self.context_mask, cross.d_key**-0.5)
            x = self.norm_after(x, self.cross_output(out), block.cross_norm)
        feed = block.feed_forward
        hidden = self.up(self.norm_before(x, block.feed_forward_norm))
        if feed.gate is None:
            hidden = feed.activation(hidden)
        else:
            gate, up = hidden.chunk(2, 1)
            hidden = feed.activation(gate) * up
        return self.norm_after(x, self.down(hidden), block.feed_forward_norm)

    def norm_before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """What a part of the block reads."""
        return cast(Tensor, norm.forward(x)) if self.block.norm == "pre" else x

    def norm_after(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """The stream ``x`` once a part has added ``y``."""
        y = x + y if self.block.residual else y
        return cast(Tensor, norm.forward(y)) if self.block.norm == "post" else y


def _merge_projections(linears: list[nn.Linear], rows: int) -> Function:
    """Projections of the same vector as one: (rows, in) to (rows, all their outputs)."""
    return _projection([linear.weight for linear in linears], [linear.bias for linear in linears], rows)


def _projection(weights: list[Tensor], biases: list[Tensor | None], rows: int) -> Function:
    bias = None
    if any(part is not None for part in biases):
        parts = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        bias = torch.cat(parts).detach()
    weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).detach()
    is_wide = weight.shape[0] >= weight.shape[1]
    if rows == 1 and is_wide:
        weight = weight.t().contiguous().t()
    as_columns = is_wide and 1 < rows <= (ROWS_OF_FEW_INPUTS if weight.shape[1] <= FEW_INPUTS else ROWS)
    if as_columns and bias is None:
        return lambda x: torch.mm(weight, x.t()).t().contiguous()
    if as_columns and bias is not None:
        column = bias[:, None]
        return lambda x: torch.addmm(column, weight, x.t()).t().contiguous()
    return lambda x: F.linear(x, weight, bias)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """q (rows, beams, heads, d_key) over keys and values (rows, kv_heads, keys, width): (rows * beams, all).

    The heads of a group are further queries of the key head they share.
    """
    rows, beams, heads, _ = q.shape
    kv_heads = keys.shape[1]
    if heads == kv_heads:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, visible, scale=scale)
        return out.transpose(1, 2).reshape(rows * beams, -1)
    group = heads // kv_heads
    folded = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if visible is not None and visible.shape[2] > 1:
        visible = visible.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(folded, keys, values, visible, scale=scale)
    out = out.view(rows, kv_heads, group, beams, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(rows * beams, -1)
