"""Keys and values of one layer of which each head keeps everything, or the first few and the last ones.

Heads that keep the same are held together, each group in a tensor of its own length: what is forgotten takes
no memory. Keys are held as they came, already rotated, so that positions stay those of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.common.types import Keywords
from manyheads.nn.attention import attention
from manyheads.nn.mask import Mask

BLOCK = 512  # queries of a forgetting head that are computed at once
_HIDDEN = -1e4  # what a mask adds to hide a key is below this


class HeadMemory:
    """The keys and values of one attention module, head by head. For inference only.

    A query at position i of a head with window w sees the keys at positions above i - w and the first few
    tokens of its sequence; padding before them does not count. So it does not matter in how many chunks a
    prompt comes.

    Parameters
    ----------
    windows: for each key/value head how many of the last tokens it keeps; None for all.
    first: how many of the first tokens every head keeps besides.

    Examples
    --------
    >>> memory = HeadMemory([None, 5], first=2)
    >>> q, k, v = torch.randn(1, 4, 100, 8), torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    >>> memory.attend(q, k, v, Mask(causal=True)).shape       # (batch, heads, queries, d_value)
    torch.Size([1, 4, 100, 8])
    >>> [group.held for group in memory.groups]
    [100, 7]

    References
    ----------
    Xiao et al. 2024, Efficient streaming language models with attention sinks.
    Xiao et al. 2024, DuoAttention: efficient long-context LLM inference with retrieval and streaming heads.
    """

    def __init__(self, windows: Sequence[int | None], first: int) -> None:
        self.windows, self.first = list(windows), first
        self.length = 0  # tokens read, those that were forgotten included
        self.start: Tensor | None = None  # (batch,): the position of the first token that is no padding
        self._start_is_final = False
        self.groups: list[FullHeads] = []
        for window in dict.fromkeys(windows):
            heads = [head for head, other in enumerate(windows) if other == window]
            group = FullHeads(heads) if window is None else ForgettingHeads(heads, first, window)
            self.groups.append(group)

    @property
    def bytes(self) -> int:
        """The memory that keys and values take."""
        return sum(x.untyped_storage().nbytes() for group in self.groups for x in group.tensors())

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Add keys and values (batch, kv_heads, new, width); attention of q (batch, heads, new, width).

        ``mask`` is about all tokens read so far: queries by keys (batch, heads, new, length).
        """
        heads, kv_heads, new = q.shape[1], k.shape[1], q.shape[2]
        if kv_heads != len(self.windows) or heads % kv_heads or k.shape[2] != new:
            raise ValueError(
                f"cache: it was made for {len(self.windows)} key/value heads and causal self-attention, got "
                f"queries {tuple(q.shape)} and keys {tuple(k.shape)}"
            )
        if self.start is not None and len(self.start) != len(q):
            raise ValueError(
                f"cache: it holds a batch of {len(self.start)}, got one of {len(q)}; make a new cache for a "
                "new batch"
            )
        self.start = self._first_tokens(mask, new, len(q), q.device)
        by_head = q.unflatten(1, (kv_heads, heads // kv_heads))
        out = q.new_empty(*by_head.shape[:4], v.shape[3])
        for group in self.groups:
            whole = len(group.heads) == kv_heads
            part = slice(None) if whole else torch.tensor(group.heads, device=q.device)
            numbers = None if whole else _query_heads(group.heads, heads // kv_heads)
            tokens = NewTokens(
                by_head[:, part].flatten(1, 2), k[:, part], v[:, part], _MaskOf(mask, numbers), self.length,
                self.start, {"scale": scale, "dropout": dropout},
            )  # fmt: skip
            group_out = group.attend(tokens).unflatten(1, (len(group.heads), -1))
            if whole:
                out = group_out
            else:
                out[:, part] = group_out
        self.length += new
        return out.flatten(1, 2)

    def reorder(self, rows: Tensor) -> None:
        """Let batch row n continue what row ``rows[n]`` held, as beam search needs."""
        if self.start is not None:
            self.start = self.start[rows.to(self.start.device)]
        for group in self.groups:
            group.reorder(rows)

    def _first_tokens(self, mask: Mask, new: int, batch: int, device: torch.device) -> Tensor:
        """Where each sequence of the batch starts, (batch,): at the first key that its last query sees."""
        start = self.start
        if start is not None and self._start_is_final:
            return start
        total = self.length + new
        visible = None
        if not mask.geometric:
            allowed, bias = mask.rectangle(range(new - 1, new), range(total), self.length, device)
            visible = _visible_keys(allowed, bias)
        if visible is None:
            begin = torch.zeros(batch, dtype=torch.int64, device=device)
        else:
            visible = visible.expand(batch, -1, -1, total).any(1)[:, 0]  # (batch, total)
            begin = torch.where(visible.any(1), visible.int().argmax(1), total)
        begin = begin.clamp(min=self.length)
        begin = begin if start is None else torch.where(start < self.length, start, begin)
        self._start_is_final = bool((begin < total).all())
        return begin


@dataclass(eq=False)
class NewTokens:
    """New tokens, as a group of heads gets them.

    q: (batch, heads, new, width).
    k, v: (batch, kv_heads, new, width).
    mask: for these heads, about all tokens read so far.
    length: how many tokens were read before.
    start: (batch,) where each sequence starts.
    options: scale and dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: _MaskOf
    length: int
    start: Tensor
    options: Keywords

    @property
    def total(self) -> int:
        """How many tokens there are with the new ones."""
        return self.length + self.k.shape[2]


class FullHeads:
    """Key/value heads that keep everything: one tensor that grows with some room to spare."""

    def __init__(self, heads: Sequence[int]) -> None:
        self.heads = list(heads)
        self.held = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The keys and the values, (batch, heads, at least held, width)."""
        return [x for x in (self._keys, self._values) if x is not None]

    def attend(self, new: NewTokens) -> Tensor:
        """Add the new keys and values, and attend to all."""
        self._keys = _append(self._keys, new.k, new.length)
        self._values = _append(self._values, new.v, new.length)
        self.held = new.total
        keys, values = self._keys[:, :, : self.held], self._values[:, :, : self.held]
        return attention(new.q, keys, values, mask=new.mask.whole(), **new.options)

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        if self._keys is not None and self._values is not None:
            rows = rows.to(self._keys.device)
            self._keys, self._values = self._keys[rows], self._values[rows]


class ForgettingHeads(FullHeads):
    """Heads that keep the first few tokens and the last ones, (batch, heads, first + window, width).

    The last ones stand in a ring, position p in slot ``first + p % window``; the n-th of the first tokens in
    slot ``first - 1 - n``. So the slots of one new token's keys are always next to each other, and it needs
    no mask. A first token counts once it has left the window.
    """

    def __init__(self, heads: Sequence[int], first: int, window: int) -> None:
        super().__init__(heads)
        self.first, self.window = first, window
        self._has_first = first == 0  # every row has its first tokens

    def attend(self, new: NewTokens) -> Tensor:
        """Add the new keys and values, and attend to what is kept."""
        k, v, length, total = new.k, new.v, new.length, new.total
        if self._keys is None or self._values is None:
            room = self.first + self.window
            self._keys, self._values = (x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in (k, v))
        if not self._has_first:
            for x, memory in ((k, self._keys), (v, self._values)):
                self._keep_first(x, memory, length, new.start)
            self._has_first = bool((new.start + self.first <= total).all())
        self.held = min(total, self.window + self.first)
        if total - length == 1:
            for x, memory in ((k, self._keys), (v, self._values)):
                memory[:, :, self.first + length % self.window] = x[:, :, 0]
            return self._attend_one(new, self._keys, self._values)
        out = self._attend_many(new, self._keys, self._values)
        last = torch.arange(max(length, total - self.window), total, device=k.device)
        slots = self.first + last % self.window
        self._keys[:, :, slots], self._values[:, :, slots] = k[:, :, last - length], v[:, :, last - length]
        return out

    def _keep_first(self, x: Tensor, memory: Tensor, length: int, start: Tensor) -> None:
        """Copy those of the new tokens (batch, heads, new, width) that are among the first of their row."""
        number = torch.arange(self.first, device=x.device)
        index = start[:, None] + number - length  # (batch, first): where they are among the new ones
        row, order = ((index >= 0) & (index < x.shape[2])).nonzero(as_tuple=True)
        if len(row):
            memory[row, :, self.first - 1 - order] = x[row, :, index[row, order]]

    def _attend_one(self, new: NewTokens, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one new token, which is among the keys and values already."""
        total, device = new.total, keys.device
        first_count = min(max(total - self.window, 0), self.first)  # first tokens that left the window
        low, high = self.first - first_count, self.first + min(total, self.window)
        allowed = None
        if not new.mask.mask.geometric:  # padding: what holds for each key, at the positions in the slots
            slot = torch.arange(low, high, device=device)
            ring = slot - self.first
            ring = total - 1 - (total - 1 - ring) % self.window
            first = new.start[:, None] + self.first - 1 - slot  # (batch, slots)
            has_left = first < total - self.window
            position = torch.where(slot < self.first, torch.where(has_left, first, -1), ring)
            allowed = new.mask.at_positions(position, total, device)
        return attention(new.q, keys[:, :, low:high], values[:, :, low:high], mask=allowed, **new.options)

    def _attend_many(self, new: NewTokens, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of several new tokens, a block of queries at a time."""
        length, device = new.length, keys.device
        position = torch.arange(max(0, length - self.window + 1), length, device=device)
        slots = self.first + position % self.window
        last = [torch.cat([memory[:, :, slots], x], 2) for memory, x in ((keys, new.k), (values, new.v))]
        begin = new.total - last[0].shape[2]  # the position of the first of the last tokens
        firsts = new.start[:, None] + torch.arange(self.first - 1, -1, -1, device=device)  # (batch, first)
        out = []
        for low in range(0, new.q.shape[2], BLOCK):
            rows = range(low, min(new.q.shape[2], low + BLOCK))
            lowest = max(begin, length + rows.start - self.window + 1)
            columns = range(lowest, length + rows.stop)
            i = torch.arange(length + rows.start, length + rows.stop, device=device)[:, None]
            near = torch.arange(columns.start, columns.stop, device=device)
            near_visible = (near <= i) & (near > i - self.window)
            first_visible = firsts[:, None, None] <= i - self.window  # (batch, 1, rows, first)
            visible = torch.cat([first_visible, near_visible.expand(len(firsts), 1, -1, -1)], -1)
            if not new.mask.mask.geometric:
                visible = new.mask.block(visible, rows, columns, firsts, length)
            part = slice(columns.start - begin, columns.stop - begin)
            k, v = (
                torch.cat([memory[:, :, : self.first], x[:, :, part]], 2)
                for memory, x in zip((keys, values), last, strict=True)
            )
            block = new.q[:, :, rows.start : rows.stop]
            out.append(attention(block, k, v, mask=visible, **new.options))
        return torch.cat(out, 2)


class _MaskOf:
    """A mask for some of the query heads; None for all of them."""

    def __init__(self, mask: Mask, heads: Iterable[int] | None) -> None:
        self.mask, self.heads = mask, None if heads is None else list(heads)

    def whole(self) -> Mask:
        """The mask of these heads."""
        if self.heads is None or self.mask.geometric:
            return self.mask
        slopes = self.mask.slopes
        return Mask(
            causal=self.mask.causal,
            lengths=self.mask.lengths,
            queries=self.mask.queries,
            slopes=None if slopes is None else slopes[self.heads],
            tensors=tuple(self._of_heads(x[(None,) * (4 - x.dim())]) for x in self.mask.tensors),
        )

    def at_positions(self, position: Tensor, total: int, device: torch.device) -> Tensor:
        """What holds for the last query and keys at positions (batch or 1, keys); -1 is no key."""
        part = self._rectangle(range(1), range(total), total - 1, device)
        index = position.clamp(min=0)[:, None, None]
        hidden = (position < 0)[:, None, None]
        gathered = [_gather(x, index, total) for x in part]
        return _join_masks(~hidden, *gathered)

    def block(self, visible: Tensor, rows: range, columns: range, firsts: Tensor, offset: int) -> Tensor:
        """What holds for a block of queries, the first tokens (batch, first) and the keys of ``columns``."""
        device = visible.device
        near = self._rectangle(rows, columns, offset, device)
        reach = range(int(firsts.max()) + 1) if firsts.numel() else range(1)
        reach = range(min(len(reach), columns.stop))
        far = self._rectangle(rows, reach, offset, device)
        index = firsts.clamp(max=len(reach) - 1)[:, None, None]
        parts: list[Tensor | None] = []
        for near_part, far_part in zip(near, far, strict=True):
            first = _gather(far_part, index, len(reach))
            if first is None or near_part is None:
                neutral = _neutral(near_part if first is None else first)
                if neutral is None:
                    parts.append(None)
                    continue
                first = neutral if first is None else first
                near_part = neutral if near_part is None else near_part
            near_part = near_part[(None,) * (4 - near_part.dim())]
            sizes = [max(a, b) for a, b in zip(first.shape[:3], near_part.shape[:3], strict=True)]
            parts.append(
                torch.cat([first.expand(*sizes, firsts.shape[1]), near_part.expand(*sizes, len(columns))], -1)
            )
        return _join_masks(visible, *parts)

    def _rectangle(
        self, rows: range, columns: range, offset: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        allowed, bias = self.mask.rectangle(rows, columns, offset, device)
        return (
            None if allowed is None else self._of_heads(allowed[(None,) * (4 - allowed.dim())]),
            None if bias is None else self._of_heads(bias[(None,) * (4 - bias.dim())]),
        )

    def _of_heads(self, x: Tensor) -> Tensor:
        return x if self.heads is None or x.shape[1] == 1 else x[:, self.heads]


def _neutral(like: Tensor | None) -> Tensor | None:
    """What changes nothing, of one entry: True for a boolean mask, 0 for one that is added."""
    return None if like is None else like.new_full((1, 1, 1, 1), 1 if like.dtype == torch.bool else 0)


def _gather(x: Tensor | None, index: Tensor, columns: int) -> Tensor | None:
    """Of x (batch or 1, heads or 1, rows, columns) the columns of index (batch or 1, 1, 1, keys)."""
    if x is None:
        return None
    x = x.expand(*x.shape[:3], columns)
    batch = max(x.shape[0], index.shape[0])
    return x.expand(batch, -1, -1, -1).gather(3, index.expand(batch, *x.shape[1:3], -1))


def _join_masks(visible: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
    """One mask: boolean, or to be added when there is a bias."""
    visible = visible if allowed is None else visible & allowed
    return visible if bias is None else torch.where(visible, bias, -torch.inf)


def _visible_keys(allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Which keys are not hidden, (batch or 1, heads or 1, queries, keys)."""
    if bias is not None:
        by_bias = bias > _HIDDEN
        allowed = by_bias if allowed is None else allowed & by_bias
    return None if allowed is None else allowed[(None,) * (4 - allowed.dim())]


def _query_heads(kv_heads: Iterable[int], group: int) -> list[int]:
    return [head * group + n for head in kv_heads for n in range(group)]


def _append(memory: Tensor | None, x: Tensor, length: int) -> Tensor:
    """The memory (batch, heads, room, width) with x behind its first ``length``, in a larger one if need
    be.
    """
    total = length + x.shape[2]
    if memory is None or memory.shape[2] < total:
        larger = x.new_empty(*x.shape[:2], total + max(64, total // 64), x.shape[3])
        if memory is not None:
            larger[:, :, :length] = memory[:, :, :length]
        memory = larger
    memory[:, :, length:total] = x
    return memory
