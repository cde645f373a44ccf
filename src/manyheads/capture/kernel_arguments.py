"""What a call of an opaque kernel computes, as its reader says it, and the same as a fused call.

A kernel that torch's function mode cannot see into (a custom operator, a CUDA extension, a plain Python
function around one) is read from outside: its queries, keys, values and settings are arguments, and what it
returns is attention's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.capture.call import Fused
from manyheads.nn.mask import Mask

HEADS_FIRST = "batch heads length width"
LENGTH_FIRST = "batch length heads width"
PACKED = "tokens heads width"
_LAYOUTS = (HEADS_FIRST, LENGTH_FIRST, PACKED)


class UnreadableError(ValueError):
    """A call whose arguments do not say what is computed; the message says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionArguments:
    """What a call of an attention function computes: what a reader for `register_attention` returns.

    Parameters
    ----------
    query, key, value: the tensors that attend, are attended to, and are averaged. Key heads may be fewer.
    layout: the axes of those three: ``"batch heads length width"``, ``"batch length heads width"``, or
        ``"tokens heads width"`` for sequences that are packed one after the other.
    output_layout: the axes of what the function returns, if they differ.
    starts: for packed sequences: where each begins, and where the last ends, (sequences + 1,), as
        flash-attention's ``cu_seqlens_q``. Dense layouts may have it too, with a batch of one.
    key_starts: the same for the keys, if they differ.
    mask: a tensor that broadcasts to (batch, heads, queries, keys): boolean, True may attend; floating,
        added to the scores.
    real: (batch, keys), True or 1 for a key that is not padding; a padded query counts as attending to
        nothing.
    causal: no query sees past its own position; the last query is aligned with the last key.
    window: how many positions before and after its own a query sees, ``(before, after)``; -1 for all.
    scale: of the scores. Default: 1 / sqrt(d_key).
    softcap: scores s become ``softcap * tanh(s / softcap)``.
    sinks: (heads,), a score for each head that takes a share of the softmax and has no value.
    slopes: (heads,) of ALiBi: ``-slope * |i - j|`` is added.
    dropout: the share of weights that is dropped.
    out: a tensor that the function writes its output to, besides returning it.

    Examples
    --------
    >>> q = k = v = torch.randn(2, 5, 3, 4)
    >>> AttentionArguments(query=q, key=k, value=v, layout="batch length heads width", causal=True).causal
    True

    See Also
    --------
    register_attention : takes a function that returns this.

    References
    ----------
    Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning" (2023).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: str = HEADS_FIRST
    output_layout: str | None = None
    starts: Tensor | None = None
    key_starts: Tensor | None = None
    mask: Tensor | None = None
    real: Tensor | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    dropout: float = 0.0
    out: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query", "key", "value"):
            if not isinstance(getattr(self, name), Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(getattr(self, name)).__name__}")
        for name in ("layout", "output_layout"):
            if (layout := getattr(self, name)) not in (*_LAYOUTS, None) or (name == "layout" and not layout):
                raise ValueError(f"{name}: got {layout!r}; expected one of {', '.join(map(repr, _LAYOUTS))}")
        axes = 3 if self.layout == PACKED else 4
        shapes = [tuple(x.shape) for x in (self.query, self.key, self.value)]
        if any(len(shape) != axes for shape in shapes):
            raise ValueError(f"query, key, value: expected the axes {self.layout!r}, got the shapes {shapes}")
        if self.layout == PACKED and self.starts is None:
            raise ValueError("starts: packed sequences need it, to say where each begins")


class SplitCall(NamedTuple):
    """The queries, keys, values and output of a call with the axes (batch, heads, length, width), and what
    puts an output back to the axes it came with.

    fused: the call, with its mask.
    scores: (batch, heads, queries, keys + sinks), where the call is no plain softmax of products.
    """

    fused: Fused
    output: Tensor
    scores: Tensor | None
    back: Back


@dataclass(frozen=True, eq=False)
class Back:
    """How (batch, heads, length, width) becomes what the function returned."""

    shape: torch.Size
    layout: str
    packing: Packing | None

    def __call__(self, edited: Tensor) -> Tensor:
        """The edited output, with the axes of the function."""
        if self.packing is not None:
            edited = self.packing.packed(edited)
        if self.layout == PACKED:
            edited = edited[0].transpose(0, 1)
        elif self.layout == LENGTH_FIRST:
            edited = edited.transpose(1, 2)
        return edited.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences that stand one behind the other, and the same as rows of a padded batch.

    index: (sequences, longest) the token that stands at each place of the batch.
    is_token: (sequences, longest) whether there is one; ``lengths`` (sequences,) how many.
    """

    index: Tensor
    is_token: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, starts: Tensor, tokens: int, name: str, at_end: bool) -> Packing:
        """The packing of some tokens by where sequences begin; with ``at_end`` padding stands before them."""
        ends = [int(number) for number in starts.tolist()]
        if len(ends) < 2 or ends[0] != 0 or ends != sorted(ends) or ends[-1] > tokens:
            raise UnreadableError(
                f"{name}: got {ends} for {tokens} tokens; expected where each sequence begins, from 0 on, "
                "and where the last ends"
            )
        first = torch.tensor(ends[:-1], device=starts.device)[:, None]
        lengths = torch.tensor(ends[1:], device=starts.device) - first[:, 0]
        longest = max(1, max(b - a for a, b in pairwise(ends)))
        steps = torch.arange(longest, device=starts.device)
        steps = steps - (longest - lengths[:, None]) if at_end else steps.expand(len(lengths), -1)
        is_token = (steps >= 0) & (steps < lengths[:, None])
        return cls(torch.where(is_token, first + steps, 0), is_token, lengths)

    def padded(self, x: Tensor) -> Tensor:
        """(1, heads, tokens, width) as (sequences, heads, longest, width), zeros where there is no token."""
        rows = x[0][:, self.index].transpose(0, 1)
        return rows.masked_fill(~self.is_token[:, None, :, None], 0.0)

    def packed(self, x: Tensor) -> Tensor:
        """The way back, (1, heads, tokens, width)."""
        return x.transpose(0, 1)[:, self.is_token][None]


def as_heads(arguments: AttentionArguments, out: Tensor) -> SplitCall:
    """A call with the axes (batch, heads, length, width), packed sequences as rows of a batch."""
    layout = arguments.output_layout or arguments.layout
    query, key, value = (_heads_first(x, arguments.layout) for x in _query_key_value(arguments))
    output = _output(out, layout, query, value)
    window, causal = _window(arguments)
    mask = Mask(causal=causal, window=window, slopes=_slopes(arguments.slopes))
    packing = None
    if arguments.starts is not None:
        if query.shape[0] != 1:
            raise UnreadableError(f"starts: packed sequences need a batch of one, got {query.shape[0]}")
        key_starts = arguments.starts if arguments.key_starts is None else arguments.key_starts
        is_shared = key_starts is arguments.starts or torch.equal(key_starts, arguments.starts)
        at_end = not is_shared and (causal or window is not None)
        packing = Packing.of(arguments.starts, query.shape[2], "starts", at_end)
        key_packing = packing if is_shared else Packing.of(key_starts, key.shape[2], "key_starts", at_end)
        if int(packing.lengths.sum()) != query.shape[2]:
            raise UnreadableError(
                f"starts: the last sequence ends before the last of {query.shape[2]} tokens"
            )
        query, output, key, value = (
            packing.padded(query), packing.padded(output), key_packing.padded(key), key_packing.padded(value)
        )  # fmt: skip
        if at_end:
            mask = mask & (packing.is_token[:, None, :, None] & key_packing.is_token[:, None, None])
        elif not bool(packing.is_token.all() & key_packing.is_token.all()):
            mask = mask & Mask(lengths=key_packing.lengths, queries=packing.lengths)
    if arguments.real is not None:
        key, value, padding = _padding(arguments.real, query, key, value, causal)
        mask = mask & padding
    mask = mask & Mask(tensors=() if arguments.mask is None else (arguments.mask,))
    sinks = 0 if arguments.sinks is None else 1
    fused = Fused(
        query,
        key,
        value,
        mask,
        arguments.scale,
        arguments.dropout,
        sinks=sinks,
        opaque=_reading_key(arguments),
    )
    scores = None if arguments.sinks is None and not arguments.softcap else _scores(fused, arguments)
    return SplitCall(fused, output, scores, Back(out.shape, layout, packing))


def _query_key_value(arguments: AttentionArguments) -> tuple[Tensor, Tensor, Tensor]:
    return arguments.query, arguments.key, arguments.value


def _reading_key(arguments: AttentionArguments) -> tuple[object, ...]:
    """What calls have in common whose arguments are read in the same way."""
    kinds = (None if x is None else (x.dim(), x.dtype) for x in (arguments.mask, arguments.real))
    unpacked = arguments.starts is None, arguments.key_starts is None
    is_single = _heads_first(arguments.query, arguments.layout).shape[2] == 1
    return (
        *kinds,
        *unpacked,
        arguments.causal,
        arguments.window,
        arguments.scale,
        arguments.softcap,
        is_single,
    )


def _heads_first(x: Tensor, layout: str) -> Tensor:
    if layout == PACKED:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if layout == LENGTH_FIRST else x


def _output(out: Tensor, layout: str, query: Tensor, value: Tensor) -> Tensor:
    """The output with the axes (batch, heads, queries, d_value); the last two may be one when it comes."""
    batch, heads, queries = query.shape[:3]
    shape = batch, heads, queries, value.shape[3]
    is_flat = layout != HEADS_FIRST and out.dim() == (2 if layout == PACKED else 3)
    by_head = out.unflatten(-1, (heads, -1)) if is_flat and out.shape[-1] % heads == 0 else out
    output = _heads_first(by_head, layout) if by_head.dim() == (3 if layout == PACKED else 4) else by_head
    if output.shape != shape:
        raise UnreadableError(
            f"it returned the shape {tuple(out.shape)}; expected the axes {layout!r} of {batch} x {queries} "
            f"queries, {heads} heads and {value.shape[3]} numbers"
        )
    return output


def _window(arguments: AttentionArguments) -> tuple[int | None, bool]:
    """A window as our masks have it, |i - j| < window, and whether it is causal."""
    before, after = arguments.window or (-1, -1)
    causal = arguments.causal or after == 0
    if causal:
        after = before
    if before != after:
        raise UnreadableError(f"window: got {arguments.window}, which is neither symmetric nor causal")
    return (None, causal) if before < 0 else (before + 1, causal)


def _slopes(slopes: Tensor | None) -> Tensor | None:
    if slopes is not None and slopes.dim() != 1:
        raise UnreadableError(f"slopes: expected one for each head, got the shape {tuple(slopes.shape)}")
    return None if slopes is None else slopes.detach().cpu().double()


def _padding(
    real: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Mask]:
    """Keys and values without the end of a cache that is not filled, and the mask of the rest."""
    real = real.bool()
    key, value = key[:, :, : real.shape[1]], value[:, :, : real.shape[1]]
    queries, keys = query.shape[2], key.shape[2]
    if real.shape != (query.shape[0], keys):
        raise UnreadableError(f"real: expected {(query.shape[0], keys)}, got {tuple(real.shape)}")
    if bool(real.all()):
        return key, value, Mask()
    lengths = real.sum(-1)
    if torch.equal(torch.arange(keys, device=real.device) < lengths[:, None], real):
        if queries == keys:
            return key, value, Mask(lengths=lengths, queries=lengths)
        if not causal:
            return key, value, Mask(lengths=lengths)
    if causal or queries != keys:
        return key, value, Mask(tensors=(real[:, None, None],))
    return key, value, Mask(tensors=(real[:, None, None] & real[:, None, :, None],))


def _scores(fused: Fused, arguments: AttentionArguments) -> Tensor:
    """All scores, (batch, heads, queries, keys + sinks): with a cap or sinks they are no plain products. The
    sinks have a gradient alone, which shows whose they are.
    """
    exact = torch.promote_types(fused.query.dtype, torch.float32)
    with torch.no_grad():
        group = fused.query.shape[1] // fused.key.shape[1]
        key = fused.key.to(exact).repeat_interleave(group, 1)
        scale = fused.query.shape[-1] ** -0.5 if fused.scale is None else fused.scale
        scores = fused.query.to(exact) @ key.transpose(-1, -2) * scale
        if arguments.softcap:
            scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
        queries, keys = scores.shape[2:]
        allowed, bias = fused.mask.rectangle(range(queries), range(keys), keys - queries, scores.device)
        scores = scores if bias is None else scores + bias
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    if arguments.sinks is None:
        return scores
    column = arguments.sinks.to(exact).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1)
