"""One layer of a transformer: attention, then a feed-forward network, each with a norm and a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from manyheads.nn.cache import KVCache
from manyheads.nn.mask import Mask
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.residual import Dropout

__all__ = ["FeedForward", "TransformerBlock"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}

# A checkpointed feed-forward handles this many tokens at a time: its hidden layer, the widest tensor in a
# block, then exists for them only. Large enough for fast matrix products.
SLICE = 2048


class FeedForward(nn.Module):
    """The feed-forward network, applied to every token: ``down(activation(up(x)))``.

    With ``gated=True`` it is ``down(activation(gate(x)) * up(x))``: SwiGLU when the activation is "silu".

    Parameters
    ----------
    d_model
        Width of a token.
    d_hidden
        Width of the hidden layer; 4 d_model by default.
    activation
        "relu", "gelu", "silu", "tanh", "sigmoid", or any function of a tensor that keeps its shape.
    gated
        Multiply the hidden layer by a second projection.
    dropout
        Share of the hidden layer that is dropped in training.
    bias
        Whether the projections have one.

    Examples
    --------
    >>> feed_forward = FeedForward(12, 48, activation="silu", gated=True, bias=False)
    >>> feed_forward(torch.randn(2, 5, 12)).shape    # (batch, length, d_model)
    torch.Size([2, 5, 12])

    See Also
    --------
    TransformerBlock : attention, then this network.

    References
    ----------
    Shazeer 2020, GLU variants improve transformer.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        *,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        gated: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        if d_hidden < 1:
            raise ValueError(f"d_hidden: expected at least 1, got {d_hidden}")
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                raise ValueError(
                    f"activation: expected a function or one of {', '.join(ACTIVATIONS)}, got {activation!r}"
                )
            activation = ACTIVATIONS[activation]
        elif not callable(activation):
            raise TypeError(f"activation: expected a function or a name, got {type(activation).__name__}")
        self.activation = activation
        self.gate = nn.Linear(d_model, d_hidden, bias=bias) if gated else None
        self.up = nn.Linear(d_model, d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)
        self.dropout = Dropout(dropout)
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d_model)`` to ``(..., d_model)``."""
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        out: Tensor = self.down(self.dropout(hidden))
        return out


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if asked for, and a feed-forward network, with norms and residuals.

    Each part computes ``x + part(norm(x))`` with ``norm="pre"``, ``norm(x + part(x))`` with ``norm="post"``.

    Parameters
    ----------
    d_model, heads
        Width of a token, and number of attention heads.
    d_hidden, activation, gated
        The feed-forward network; see `FeedForward`.
    norm
        "pre" (before each part: trains without warm-up) or "post" (after it: the original).
    rms_norm
        Divide by the root mean square only, without centring, scale without bias (Llama), instead of
        layer norm.
    norm_eps
        Added to the variance in every norm.
    residual
        Whether each part adds to its input or replaces it.
    dropout
        Share dropped in training of each part's output and of the feed-forward's hidden layer.
    attention_dropout, hidden_dropout
        Share dropped in training of the attention weights, and of the feed-forward's hidden layer if that is
        to differ from ``dropout``: GPT-2 has none there.
    cross
        Also attend to another sequence, the context.
    checkpoint
        Activation checkpointing: keep only the block's input for the backward pass, and recompute the block
        there: less memory, about a third more time. The feed-forward works on slices of the tokens.
    bias
        Whether projections and layer norms have one.
    attention
        Options of the self-attention's `MultiHeadAttention`: kv_heads, d_key, d_value, qk_norm, rotary,
        window, chunk, kernel. Cross-attention takes them, too, except rotary, window and chunk, which are for
        positions in one sequence; its d_context is the context's width.

    Examples
    --------
    >>> block = TransformerBlock(12, heads=3, activation="silu", gated=True, rms_norm=True, kv_heads=1)
    >>> block(torch.randn(2, 5, 12), causal=True).shape                   # (batch, length, d_model)
    torch.Size([2, 5, 12])
    >>> block = TransformerBlock(12, heads=3, cross=True, d_context=7)
    >>> block(torch.randn(2, 5, 12), torch.randn(2, 11, 7)).shape         # context (batch, keys, d_context)
    torch.Size([2, 5, 12])

    See Also
    --------
    Encoder, Decoder, Seq2Seq : stacks of blocks.
    MultiHeadAttention, FeedForward : its parts.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need (post-norm).
    Xiong et al. 2020, On layer normalization in the transformer architecture (pre-norm).
    Zhang and Sennrich 2019, Root mean square layer normalization.
    Chen et al. 2016, Training deep nets with sublinear memory cost (checkpointing).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        d_hidden: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        gated: bool = False,
        norm: str = "pre",
        rms_norm: bool = False,
        norm_eps: float = 1e-5,
        residual: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        hidden_dropout: float | None = None,
        cross: bool = False,
        checkpoint: bool = False,
        bias: bool = True,
        d_context: int | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm: expected 'pre' or 'post', got {norm!r}")
        if d_context is not None and not cross:
            raise ValueError(f"d_context: got {d_context} for a block without cross-attention (cross=True)")
        self.d_model = d_model
        self.norm = norm
        self.residual = residual
        self.checkpoint = checkpoint
        options = {"dropout": attention_dropout, "bias": bias} | attention
        self.attention = MultiHeadAttention(d_model, heads, **options)
        self.attention_norm = make_norm(d_model, rms_norm, norm_eps, bias)
        self.cross_attention: MultiHeadAttention | None = None
        if cross:
            options = {k: v for k, v in options.items() if k not in ("rotary", "window", "chunk")}
            self.cross_attention = MultiHeadAttention(d_model, heads, d_context=d_context, **options)
            self.cross_norm = make_norm(d_model, rms_norm, norm_eps, bias)
        inner = dropout if hidden_dropout is None else hidden_dropout
        self.feed_forward = FeedForward(
            d_model, d_hidden, activation=activation, gated=gated, dropout=inner, bias=bias
        )
        self.feed_forward_norm = make_norm(d_model, rms_norm, norm_eps, bias)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        context_cache: KVCache | None = None,
    ) -> Tensor:
        """``x (batch, length, d_model)`` to the same shape.

        ``mask`` and ``causal`` are for the self-attention, ``context_mask`` for the cross-attention. With
        a ``cache``, x continues the sequence in it; ``context_cache``
        (``block.cross_attention.remember(context)``) stands for the context.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x: expected (batch, length, {self.d_model}), got {tuple(x.shape)}")
        if self.cross_attention is None and context is not None:
            raise ValueError("context: got one, but this block has no cross-attention (cross=False)")
        if self.cross_attention is not None and context is None and context_cache is None:
            raise ValueError("context: expected one, this block has cross-attention (cross=True), got none")
        if self.checkpoint and torch.is_grad_enabled() and cache is None:
            out: Tensor = recompute(
                self._parts, x, context, mask, context_mask, causal, None, context_cache, use_reentrant=False
            )
            return out
        return self._parts(x, context, mask, context_mask, causal, cache, context_cache)

    def _parts(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Mask | Tensor | None,
        context_mask: Mask | Tensor | None,
        causal: bool,
        cache: KVCache | None,
        context_cache: KVCache | None,
    ) -> Tensor:
        x = self._around(
            lambda y: self.attention(y, mask=mask, causal=causal, cache=cache), self.attention_norm, x
        )
        if self.cross_attention is not None:
            cross = self.cross_attention
            x = self._around(
                lambda y: cross(y, context, mask=context_mask, cache=context_cache), self.cross_norm, x
            )
        if self.checkpoint and torch.is_grad_enabled() and x.shape[0] * x.shape[1] > SLICE:
            slices = x.reshape(-1, self.d_model).split(SLICE)
            outputs = [recompute(self._feed, tokens, use_reentrant=False) for tokens in slices]
            return torch.cat(outputs).view_as(x)
        return self._feed(x)

    def _feed(self, x: Tensor) -> Tensor:
        return self._around(self.feed_forward, self.feed_forward_norm, x)

    def _around(self, part: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> Tensor:
        y = self.dropout(part(norm(x) if self.norm == "pre" else x))
        if self.residual:
            y = x + y
        out: Tensor = norm(y) if self.norm == "post" else y
        return out

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}, residual={self.residual}, checkpoint={self.checkpoint}"


def make_norm(d_model: int, rms_norm: bool, eps: float, bias: bool) -> nn.Module:
    """The norm that blocks and transformers use: layer norm, or the root mean square alone."""
    return nn.RMSNorm(d_model, eps) if rms_norm else nn.LayerNorm(d_model, eps, bias=bias)
