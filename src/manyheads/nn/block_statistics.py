"""The core statistics of long sequences, from sums over blocks of their scores.

A block of scores stays in the processor's cache from the product to its last sum. Only sums of e = exp(s) and
of e s are taken, with no second product: this is faster than a call of the fused kernel with the keys as
values, which would give the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.nn.mask import Mask
from manyheads.nn.tile_statistics import STEPS, SUMS, copy_diagonals, core_statistics, reciprocal
from manyheads.nn.tiles import Scratch, scratch

# Queries and keys of a block, and how many scores all heads that share a product have in it.
ROWS, COLUMNS = 256, 512
ELEMENTS = 2**19
# Elements of the queries that are worked on at once.
PIECE = 2**20
# Sums of exp(s) within these bounds have lost nothing; others are taken again from scores less their largest.
SAFE = 1e-25, 1e35
# Fewer keys than this are faster by tiles with whole rows.
SHORTEST = 256


class Raw(NamedTuple):
    """What is summed, of all queries or of some."""

    sums: Tensor  # (SUMS, batch, kv_heads, group, queries)
    features: Tensor | None  # (batch, kv_heads, group, queries, n)

    def part(self, *index: int | slice) -> Raw:
        """Of some sequences, of some heads ..."""
        return Raw(self.sums[(slice(None), *index)], None if self.features is None else self.features[index])

    def by_name(self) -> dict[str, Tensor]:
        """Each sum by its name."""
        return dict(zip(SUMS, self.sums.unbind(), strict=True))


def pays(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether this engine applies: on the CPU (it reads numbers, for which a GPU would wait), for masks that
    are formulas, and for long sequences.
    """
    possible = q.device.type == "cpu" and mask.slopes is None and not mask.tensors
    return possible and k.shape[2] >= SHORTEST


def core(
    q: Tensor, k: Tensor, mean: Tensor, mask: Mask, scale: float, offset: int, features: Tensor | None
) -> dict[str, Tensor]:
    """The core statistics of q (batch, kv_heads, group, queries, d_key) over k less ``mean``, still grouped.

    Some sequences, or some heads of one, at a time, so that what is needed on the way stays small.
    ``offset`` is the position of query 0 among the keys.
    """
    batch, kv_heads, group, queries, width = q.shape
    sequences = max(1, PIECE // max(1, kv_heads * group * queries * width))
    heads = max(1, min(kv_heads, PIECE // max(1, group * queries * width)))
    means = None if features is None else q.new_zeros(*q.shape[:4], features.shape[2])
    raw = Raw(q.new_zeros(len(SUMS), *q.shape[:4]), means)
    for start in range(0, batch, sequences):
        members = slice(start, start + sequences)
        lengths, queries_of_part = (None if x is None else x[members] for x in (mask.lengths, mask.queries))
        part = replace(mask, lengths=lengths, queries=queries_of_part)
        part_features = None if features is None else features[members]
        for head in range(0, kv_heads, heads):
            index = members, slice(head, head + heads)
            _fill(raw.part(*index), q[index], k[index], mean[index], part, scale, offset, part_features)
    sums = raw.by_name()
    stats = core_statistics(sums)
    if means is not None:
        stats["features"] = means.mul_(reciprocal(sums["total"]).unsqueeze(-1))
    return stats


def _fill(
    raw: Raw,
    q: Tensor,
    k: Tensor,
    mean: Tensor,
    mask: Mask,
    scale: float,
    offset: int,
    features: Tensor | None,
) -> None:
    """Add up some sequences and heads with centred keys."""
    take = scratch(q.dtype, q.device)
    k = torch.sub(k, mean.unsqueeze(2), out=_key_memory(k, take))
    keys, queries = k.shape[2], q.shape[3]
    count = mask.count(queries, keys, q.device, offset)[:, None, None]
    sums = raw.by_name()
    sums["keys"].copy_(count)
    for n in range(len(q)):
        key_length = keys if mask.lengths is None else int(mask.lengths[n].clamp(0, keys))
        query_length = queries if mask.queries is None else int(mask.queries[n].clamp(0, queries))
        rest = mask.of_sequence(n, query_length, key_length)
        part_features = None if features is None else features[n]
        part_q, part_k = q[n, :, :, :query_length], k[n, :, :key_length]
        _add(raw.part(n), part_q, part_k, rest, scale, offset, part_features, take)
    total, is_empty = sums["total"], count == 0
    if is_empty.any():  # a hidden score whose exp is infinite turns zeros into NaN
        raw.sums.masked_fill_(is_empty, 0.0)
        if raw.features is not None:
            raw.features.masked_fill_(is_empty.unsqueeze(-1), 0.0)
    lost = (total > SAFE[0]).logical_and_(total < SAFE[1]).logical_or_(is_empty).logical_not_()
    if lost.any():
        _sum_lost_rows(raw, q, k, mask, scale, offset, features, lost)


def _key_memory(k: Tensor, take: Scratch) -> Tensor:
    """Scratch memory for (batch, kv_heads, keys, d_key) in the order in which k lies in memory."""
    if k.stride(1) < k.stride(2):
        return take("keys", (k.shape[0], k.shape[2], k.shape[1], k.shape[3])).transpose(1, 2)
    return take("keys", k.shape)


def _add(
    raw: Raw,
    q: Tensor,
    k: Tensor,
    mask: Mask,
    scale: float,
    offset: int,
    features: Tensor | None,
    take: Scratch,
) -> None:
    """Add up the blocks of q (heads, group, queries, d_key), k (heads, keys, d_key), features (keys, n)."""
    heads, group, queries, _ = q.shape
    heads_at_once = max(1, ELEMENTS // (group * max(1, min(queries, ROWS)) * COLUMNS))
    ones, threads = q.new_ones(COLUMNS), torch.get_num_threads()
    for start in range(0, queries, ROWS):
        rows = range(start, min(queries, start + ROWS))
        blocks = _blocks(mask, rows, k.shape[1], offset, q)
        for head in range(0, heads, heads_at_once):
            index = slice(head, head + heads_at_once), slice(None), slice(rows.start, rows.stop)
            part = raw.part(*index)
            sums = part.by_name()
            part_q = q[index]
            x = torch.mul(part_q, scale, out=take("queries", part_q.shape)).flatten(1, 2)
            keys = k[index[0]].transpose(1, 2)
            if len(x) == 1 and x.shape[1] % threads == 0:
                # one product for each thread, which then has its part of the scores in its own cache
                x, keys = x.view(threads, -1, x.shape[2]), keys.expand(threads, -1, -1)
            total, weighted = x.new_zeros(2, x.shape[0] * x.shape[1])
            for columns, keep in blocks:
                s = take("scores", (*x.shape[:2], len(columns)))
                torch.bmm(x, keys[..., columns.start : columns.stop], out=s)
                e = torch.exp(s, out=take("exp", s.shape))
                by_head = e.view(-1, group, len(rows), len(columns))
                if keep is not None:
                    by_head *= keep
                copy_diagonals(sums, by_head, rows, columns, offset, mask.causal)
                if features is not None and part.features is not None:
                    part.features.add_(by_head @ features[columns.start : columns.stop])
                # a product with ones is faster than `sum` over rows that are not long
                total.addmv_(e.flatten(0, 1), ones[: len(columns)])
                weighted.addmv_(s.mul_(e).flatten(0, 1), ones[: len(columns)])
            sums["total"].copy_(total.view(sums["total"].shape))
            sums["weighted"].copy_(weighted.view(sums["total"].shape))


def _blocks(
    mask: Mask, rows: range, keys: int, offset: int, like: Tensor
) -> list[tuple[range, Tensor | None]]:
    """The columns that these rows may reach, in parts; with 1 where a query may attend if some may not."""
    low, high = mask.key_range(rows, keys, offset)
    left, right = (min(max(edge, low), high) for edge in mask.open_range(rows, keys, offset))
    blocks: list[tuple[range, Tensor | None]] = []
    for start, stop, is_open in ((low, left, False), (left, right, True), (max(left, right), high, False)):
        for first in range(start, stop, COLUMNS):
            columns = range(first, min(first + COLUMNS, stop))
            visible = None if is_open else mask.rectangle(rows, columns, offset, like.device)[0]
            blocks.append((columns, None if visible is None else visible.to(like.dtype)))
    return blocks


def _sum_lost_rows(
    raw: Raw,
    q: Tensor,
    k: Tensor,
    mask: Mask,
    scale: float,
    offset: int,
    features: Tensor | None,
    lost: Tensor,
) -> None:
    """Where exp overflowed or vanished, take it of scores less the largest of their query."""
    sums, j = raw.by_name(), torch.arange(k.shape[2], device=q.device)
    rows_at_once = max(1, ELEMENTS // k.shape[2])
    for n, head in lost.flatten(2).any(-1).nonzero().tolist():
        for index in lost[n, head].nonzero().split(rows_at_once):
            rows = n, head, *index.unbind(-1)
            i = index[:, 1:] + offset
            allowed = mask.allows(i, j)
            if mask.lengths is not None:
                allowed = allowed & (j < mask.lengths[n])
            s = (q[rows] * scale @ k[n, head].T).masked_fill_(~allowed, -torch.inf)
            top = s.amax(-1, keepdim=True)
            e = s.sub_(top).exp()
            sums["shift"][rows], sums["total"][rows], sums["first"][rows] = (
                top.squeeze(-1),
                e.sum(-1),
                e[:, 0],
            )
            sums["weighted"][rows] = s.masked_fill_(~allowed, 0.0).mul_(e).sum(-1)
            for name, step in STEPS.items():
                sums[name][rows] = e.where(j == i + step, 0.0).sum(-1)
            if features is not None and raw.features is not None:
                raw.features[rows] = e @ features[n]
