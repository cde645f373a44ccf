"""maps: the exact attention of chosen heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.call_rows import weight_rows
from manyheads.capture.interceptor import Interceptor, module_paths
from manyheads.capture.site import Selection, Site
from manyheads.common.preserved_state import untouched
from manyheads.common.registry import registered
from manyheads.common.run_batch import run
from manyheads.common.types import Batch, Heads

_ROWS = 256  # queries at a time


@dataclass(frozen=True, eq=False)
class Map:
    """Attention of some heads of one site.

    weights: (batch, heads, rows, columns), in the order of `heads`. Rows are `queries`; a pooled map has
        rows that are the mean over `row_size` queries and columns that are the sum over `column_size` keys,
        so that a row still sums to one.
    """

    site: Site
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    weights: Tensor
    row_size: int = 1
    column_size: int = 1

    def _repr_png_(self) -> bytes:
        """In a notebook it draws itself: a row of maps for each sequence, the first eight of them."""
        png: bytes = registered("view.map_picture")(self)
        return png


def maps(
    model: nn.Module, batch: Batch, heads: Heads, queries: Sequence[int] | None = None, size: int | None = 512
) -> dict[str, Map]:
    """Run the model once and return the exact attention of the chosen heads.

    Parameters
    ----------
    model: any torch.nn.Module; run as it is, without gradients.
    batch: a dict (passed by name), a tuple or list (passed in order), or one tensor.
    heads: ``{layer number or site: [head numbers]}``.
    queries: positions of the queries wanted, negative ones counted from the end; all by default.
    size: maps with more rows or columns than this are pooled down to it; None for never.

    Returns
    -------
    ``{site: Map}``; pieces of one site's attention, where a model loops over them, are placed
    one after the other in the batch, in order, if they have the same shape; otherwise the last is kept.

    See Also
    --------
    watch: statistics of every head.
    silence: switch heads off.

    References
    ----------
    Vig, "A multiscale visualization of attention in the transformer model" (2019).

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> attention = maps(layer, (x, x, x), {0: [1]})[""]
    >>> attention.weights.shape, torch.allclose(attention.weights.sum(-1), torch.ones(3, 1, 5))
    (torch.Size([3, 1, 5, 5]), True)
    """
    chosen = Selection(heads, module_paths(model).values())
    if size is not None and size < 1:
        raise ValueError(f"size: expected at least 1, got {size}")
    site_maps: dict[str, Map] = {}

    def on_call(call: Call) -> None:
        numbers = chosen.at(call.site)
        if numbers and not call.again:
            with torch._C.DisableTorchFunction():
                piece, before = _map(call, numbers, queries, size), site_maps.get(call.site.name)
                site_maps[call.site.name] = piece if before is None else _joined(before, piece)

    with untouched(model), torch.no_grad(), Interceptor(model, on_call) as interceptor:
        run(model, batch)
    chosen.finish(interceptor.sites.by_name.values())
    return site_maps


def _joined(before: Map, piece: Map) -> Map:
    """Two pieces of one site's attention: queries of the same sequences, or other sequences."""
    old, new = before.weights, piece.weights
    if before.site.scattered and old.shape[0] == new.shape[0] and old.shape[3] == new.shape[3]:
        queries = (*before.queries, *(len(before.queries) + query for query in piece.queries))
        return replace(piece, queries=queries, weights=torch.cat([old, new], 2))
    return replace(piece, weights=torch.cat([old, new])) if old.shape[1:] == new.shape[1:] else piece


def _map(call: Call, numbers: list[int], queries: Sequence[int] | None, size: int | None) -> Map:
    length, keys = call.queries, call.keys
    positions = list(range(length)) if queries is None else [_position(i, length) for i in queries]
    row_size = 1 if size is None or queries is not None else -(-length // size)
    column_size = 1 if size is None else -(-keys // size)
    parts = []
    step = row_size * max(1, _ROWS // row_size)
    for start in range(0, len(positions), step):
        weights = weight_rows(call, numbers, positions[start : start + step])  # (batch, heads, rows, keys)
        if column_size > 1:
            weights = (
                nn.functional.pad(weights, (0, -keys % column_size)).unflatten(-1, (-1, column_size)).sum(-1)
            )
        if row_size > 1:
            weights = torch.stack([part.mean(2) for part in weights.split(row_size, 2)], 2)
        parts.append(weights)
    return Map(call.site, tuple(numbers), tuple(positions), torch.cat(parts, 2), row_size, column_size)


def _position(query: int, length: int) -> int:
    if not -length <= query < length:
        raise ValueError(f"queries: {query} is not among the {length} queries of this call")
    return query % length
