"""Rows of a head's exact attention, with the facts about their positions by which roles are judged.

A call's weights come a tile at a time, so that nothing of the size (length, length) is held; a tile's rows
are whole, so that the largest weight of a query is known at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.capture.call import Call
from manyheads.capture.mask_reading import Visible
from manyheads.capture.site import Site
from manyheads.nn.mask import Mask
from manyheads.nn.tiles import Hidden, Tile, centred, hidden, scores, scratch, tiles

if TYPE_CHECKING:
    from manyheads.heads.roles.direct_logits import Lens
    from manyheads.heads.roles.word_alignment import Words

# The place of a largest weight that is on no key, but on a learned sink.
NOWHERE = -(2**40)


@dataclass(frozen=True, eq=False)
class Facts:
    """Facts about a batch besides its attention.

    special: ids of special tokens.
    separators: ids of punctuation and of special tokens; None without a tokenizer.
    frequencies: (vocabulary,) how often each id occurs in all batches; None when they hold no ids.
    targets: for a role the place (batch, length) that each query should look at, -1 for none.
    copy: where the first copy of the random tokens stands, which a second one follows at once.
    begin: queries before this one are of no interest.
    lens: from the output of a head to logits, for models with a vocabulary head.
    words: which tokens are which word, and the dependencies between words.
    """

    special: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    separators: Tensor | None = None
    frequencies: Tensor | None = None
    targets: dict[str, Tensor] = field(default_factory=dict)
    copy: range = range(0)
    begin: int = 0
    lens: Lens | None = None
    words: Words | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Some queries of some heads, and their weights on the keys from position `start` on.

    weights: (batch, heads, rows, keys), zero where hidden.
    allowed: whether a query may attend to a key; broadcasts to the weights.
    counted: (batch, heads, rows) False for padding and for queries that have no choice.
    position: (rows,) where the queries stand among the keys.
    sequences, heads: which of the call's batch and heads these are.
    output: (batch, heads, rows, d_value) the outputs of the heads, where the call shows it.
    value_norm: (batch, heads, keys) the length of each key's value, likewise.
    tokens: (batch, length) ids of all keys of the call, where they are known.
    sinks: (batch, heads, rows, n) weights on learned sinks, which are no keys.
    """

    weights: Tensor
    allowed: Tensor
    counted: Tensor
    position: Tensor
    start: int
    site: Site
    facts: Facts
    sequences: slice = field(default_factory=lambda: slice(None))
    heads: slice = field(default_factory=lambda: slice(None))
    output: Tensor | None = None
    value_norm: Tensor | None = None
    tokens: Tensor | None = None
    sinks: Tensor | None = None

    @cached_property
    def keys(self) -> Tensor:
        """(keys,) the positions of the keys."""
        return torch.arange(self.start, self.start + self.weights.shape[-1], device=self.weights.device)

    @cached_property
    def seen(self) -> Tensor:
        """(batch, heads, rows) how many keys each query may attend to."""
        count = self.allowed.expand(*self.allowed.shape[:-1], self.weights.shape[-1]).sum(-1)
        return count.expand(self.weights.shape[:-1])

    @cached_property
    def largest(self) -> Tensor:
        """(batch, heads, rows) the position of the largest weight; NOWHERE when a learned sink has it."""
        # Hidden keys never win, also where every visible weight is too small for a number.
        value, position = self.weights.masked_fill(~self.allowed, -1.0).max(-1)
        position = position + self.start
        if self.sinks is not None:
            position = position.masked_fill(self.sinks.amax(-1) > value, NOWHERE)
        return position

    def at(self, positions: Tensor) -> Tensor:
        """(batch, heads, rows) the weight at a position for each query, zero where it has none there."""
        index, inside = self._index(positions)
        return self.weights.gather(-1, index).squeeze(-1) * inside

    def may(self, positions: Tensor) -> Tensor:
        """(batch, heads, rows) whether the query may attend to that position."""
        index, inside = self._index(positions)
        return self.allowed.expand(self.weights.shape).gather(-1, index).squeeze(-1) & inside

    def mean(self, feature: Tensor) -> Tensor:
        """(batch, heads, rows) the mean of a feature of keys under the weights; it broadcasts to them."""
        return (self.weights * feature).sum(-1)

    def uniform(self, feature: Tensor) -> Tensor:
        """(batch, heads, rows) the same for a reader that gives every key it may see the same weight."""
        return ((self.allowed * feature).sum(-1) / self.seen.clamp(min=1)).expand(self.weights.shape[:-1])

    def of_keys(self, ids: Tensor) -> Tensor | None:
        """(batch, 1, 1, keys) whether a key's token is one of the ids; None when tokens are not known."""
        if self.tokens is None:
            return None
        tokens = self.tokens[:, self.start : self.start + self.weights.shape[-1]]
        return torch.isin(tokens, ids.to(tokens.device))[:, None, None]

    def target(self, role: str) -> Tensor:
        """(batch, 1, rows) the position that each query should look at for a role, -1 for none."""
        targets = self.facts.targets[role].to(self.weights.device)
        return targets[self.sequences][:, self.position].unsqueeze(1)

    def _index(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        column = positions.expand(self.weights.shape[:-1]) - self.start
        inside = (column >= 0) & (column < self.weights.shape[-1])
        return column.clamp(0, self.weights.shape[-1] - 1).unsqueeze(-1), inside


def tiles_of_rows(
    call: Call, visibility: Visible, real_queries: Tensor | None, facts: Facts
) -> Iterator[Rows]:
    """The rows of a call, a tile at a time. ``real_queries`` (batch, queries) is False for padding.

    Call under torch.no_grad, outside the mode that intercepts.
    """
    offset, batch = visibility.keys - call.queries, call.output.shape[0]
    norms = None
    if not call.partial:
        norms = torch.linalg.vector_norm(call.value[:, :, : visibility.keys], dim=-1, dtype=_exact(call))
        norms = norms.repeat_interleave(call.site.heads // norms.shape[1], 1)
    for tile, weights, allowed, sinks in _tiles_of(call, visibility, facts.begin - offset):
        heads = weights.shape[1] // (tile.kv_heads.stop - tile.kv_heads.start)
        chosen = slice(tile.kv_heads.start * heads, tile.kv_heads.stop * heads)
        row_slice, column_slice = (slice(part.start, part.stop) for part in (tile.rows, tile.columns))
        position = torch.arange(tile.rows.start, tile.rows.stop, device=weights.device) + offset
        rows = Rows(
            weights,
            allowed,
            torch.ones(1, device=weights.device),
            position,
            tile.columns.start,
            call.site,
            facts,
            tile.batch,
            chosen,
            None if call.partial else call.output[tile.batch, chosen, row_slice],
            None if norms is None else norms[tile.batch, chosen, column_slice],
            None if call.tokens is None else call.tokens.expand(batch, -1)[tile.batch],
            sinks,
        )
        counted = rows.seen > 1
        if real_queries is not None:
            counted = counted & real_queries.expand(batch, -1)[tile.batch, row_slice].unsqueeze(1)
        yield replace(rows, counted=counted)


def _exact(call: Call) -> torch.dtype:
    return torch.promote_types(call.output.dtype, torch.float32)


def _tiles_of(
    call: Call, visibility: Visible, begin: int
) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor | None]]:
    """Tiles with their weights and what they may see (batch, heads, rows, keys), and weights of sinks."""
    exact, keys, mask = _exact(call), visibility.keys, visibility.mask
    take = scratch(exact, call.output.device)
    if call.scores is not None:
        left = call.sinks[0]
        shape = (call.scores.shape[0], call.scores.shape[1], 1, call.queries)
        for tile in tiles(Mask(), shape, keys, keys - call.queries):
            if tile.rows.stop > begin:
                s = call.scores[tile.batch, tile.kv_heads, tile.rows.start : tile.rows.stop].to(exact)
                p = s.softmax(-1).nan_to_num_(0.0)
                sinks = (
                    torch.cat([p[..., :left], p[..., left + call.keys :]], -1) if sum(call.sinks) else None
                )
                weights = p[..., left : left + keys]
                yield tile, weights, weights > 0, sinks
        return
    if call.query is None or call.key is None:
        raise ValueError(f"{call.site.name}: a call with neither scores nor queries and keys")
    group, offset = call.query.shape[1] // call.key.shape[1], keys - call.queries
    q = call.query.to(exact).unflatten(1, (call.key.shape[1], group))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    k = centred(q, call.key[:, :, :keys].to(exact), scale)[0].contiguous()
    for tile in tiles(mask, q.shape[:4], keys, offset):
        if tile.rows.stop > begin:
            parts, _ = hidden(mask, offset, group, k, tile)
            s = scores(q, k, scale, tile, parts, take).flatten(1, 2)
            allowed = _allowed(parts, tile, group, k.device)
            weights = s.masked_fill_(~allowed, -torch.inf).softmax(-1).nan_to_num_(0.0)
            if any(tensor.is_floating_point() for tensor in mask.tensors):
                allowed = weights > 0  # what a bias hides has no weight
            yield tile, weights, allowed, None


def _allowed(parts: list[Hidden], tile: Tile, group: int, device: torch.device) -> Tensor:
    """Whether a query may attend to a key, broadcasting to (batch, heads, rows, keys)."""
    keeps = [keep for _, _, keep in parts if keep is not None]
    shape = torch.broadcast_shapes((1, 1, 1, 1, 1), *((*keep.shape[:-1], 1) for keep in keeps))
    allowed = torch.ones(*shape[:-1], len(tile.columns), dtype=torch.bool, device=device)
    for columns, _, keep in parts:
        if keep is not None:
            allowed[..., columns] &= keep.bool()
    if shape[1] * shape[2] > 1:  # heads differ
        allowed = allowed.expand(-1, tile.kv_heads.stop - tile.kv_heads.start, group, -1, -1)
    return allowed.flatten(1, 2)
