"""One forward pass of a model, and what its heads attend to: every map pooled, chosen ones exact.

Nothing of the size (heads, length, length) is kept: maps are made some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.call_rows import weight_rows
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible
from manyheads.capture.site import Site
from manyheads.common.run_batch import run
from manyheads.common.types import Batch

THUMBNAIL = 48
# Entries of a short map, of which every head is kept exactly.
SHORT = 72 * 72
# Weights of all heads of a site that are held at once.
_HELD = 2**23


@dataclass(eq=False)
class SiteMaps:
    """The maps of one site, of the first sequence of a batch, without its padding.

    thumbnails: (heads, at most 48, at most 48), the mean over the weights that a cell stands for.
    exact: {head number: (queries, keys)}.
    pooled: (heads, rows, columns), the mean over `row_size` queries of the sum over `column_size` keys; None
        when every head is exact.
    distance: (heads, bins of `bins`) the share of attention by how far the key is from the query; None where
        queries and keys are different things.
    ids: the tokens of the keys, where they could be followed.
    """

    site: Site
    queries: int
    keys: int
    thumbnails: Tensor
    exact: dict[int, Tensor]
    pooled: Tensor | None
    row_size: int
    column_size: int
    distance: Tensor | None
    ids: list[int] | None
    blocked: bool


@dataclass(eq=False)
class Seen:
    """The result of a forward pass, and the maps of each site."""

    result: object = None
    maps: list[SiteMaps] = field(default_factory=list)


def see(
    model: nn.Module,
    batch: Batch,
    *,
    exact: Callable[[Site], Sequence[int]] | None = None,
    pooled: int = 128,
    thumbnail: int = THUMBNAIL,
    also: Callable[[Call], None] = lambda call: None,
) -> Seen:
    """Run a model once, without gradients, and keep what its heads attend to.

    Parameters
    ----------
    model: any torch.nn.Module, run as it is.
    batch: a dict, a tuple or a tensor; only its first sequence is kept.
    exact: which heads of a site to keep exactly where maps are long; none without it.
    pooled: the most rows and columns of a pooled map.
    thumbnail: the most rows and columns of a thumbnail.
    also: called with each call.

    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(1, 5, 6)
    >>> site_maps = see(layer, (x, x, x)).maps[0]
    >>> site_maps.thumbnails.shape, site_maps.exact[1].shape
    (torch.Size([2, 5, 5]), torch.Size([5, 5]))
    """
    seen = Seen()
    site_maps: dict[str, SiteMaps] = {}

    def collect(call: Call) -> None:
        if call.again:
            return
        with torch._C.DisableTorchFunction():
            also(call)
            site_maps[call.site.name] = _site_maps(call, exact, pooled, thumbnail)

    with torch.no_grad(), Interceptor(model, collect, tokens=True):
        seen.result = run(model, batch)
    seen.maps = list(site_maps.values())
    return seen


def _site_maps(
    call: Call, exact: Callable[[Site], Sequence[int]] | None, pooled_size: int, thumbnail: int
) -> SiteMaps:
    visibility = visible(call)
    update_site(call, visibility)
    site, device = call.site, call.output.device
    keys = torch.arange(call.keys, device=device)
    if visibility.real is not None:
        keys = visibility.real[0, : call.keys].to(device).nonzero().flatten()
    square = call.queries == call.keys and not site.cross
    queries = keys if square else torch.arange(call.queries, device=device)
    rows, columns = len(queries), len(keys)
    brief = rows * columns <= SHORT
    exact_heads = list(range(site.heads)) if brief else list(exact(site)) if exact is not None else []
    row_size, column_size = -(-rows // pooled_size) or 1, -(-columns // pooled_size) or 1
    by_rows, by_columns = (area(size, min(size, thumbnail), device) for size in (rows, columns))
    thumbnails = torch.zeros(site.heads, len(by_rows), columns, device=device)
    parts: list[Tensor] = []
    pooled: list[Tensor] = []
    bins = None
    if not site.cross and visibility.aligned and not call.blocked and columns:
        bins = torch.zeros(site.heads, len(EDGES) * 2 + 1, device=device, dtype=torch.float64)
    step = max(1, _HELD // max(1, site.heads * call.keys))
    step = max(row_size, step // row_size * row_size)
    all_heads = list(range(site.heads))
    for start in range(0, rows, step):
        chosen = queries[start : start + step]
        weights = weight_rows(call, all_heads, chosen.tolist())[0].float()  # (heads, rows, all keys)
        if columns < call.keys:
            weights = weights[..., keys]
        thumbnails += by_rows[:, start : start + step] @ weights
        if exact_heads:
            parts.append(weights[exact_heads])
        if not brief:
            pooled.append(_pooled(weights, row_size, column_size))
        if bins is not None:
            distance_bin = bin_of(keys[None] - (chosen + visibility.offset)[:, None]).flatten()
            bins.scatter_add_(1, distance_bin.expand(site.heads, -1), weights.flatten(1).double())
    return SiteMaps(
        site,
        rows,
        columns,
        thumbnails @ by_columns.T,
        dict(zip(exact_heads, torch.cat(parts, 1), strict=True)) if parts else {},
        torch.cat(pooled, 1) if pooled else None,
        row_size,
        column_size,
        None if bins is None else bins / max(1, rows),
        None if call.tokens is None else call.tokens[0, keys.to(call.tokens.device)].tolist(),
        call.blocked,
    )


def area(size: int, cells: int, device: torch.device | None = None) -> Tensor:
    """The matrix (cells, size) that takes means over equal intervals, which may share an entry in parts.

    >>> area(3, 2)
    tensor([[0.6667, 0.3333, 0.0000],
            [0.0000, 0.3333, 0.6667]])
    """
    if not cells:
        return torch.zeros(0, size, device=device)
    width = size / cells
    start = torch.arange(cells, device=device, dtype=torch.float64)[:, None] * width
    position = torch.arange(size, device=device, dtype=torch.float64)
    shared = (torch.minimum(start + width, position + 1) - torch.maximum(start, position)).clamp(min=0.0)
    return (shared / width).float()


def _pooled(weights: Tensor, row_size: int, column_size: int) -> Tensor:
    if column_size > 1:
        filled = nn.functional.pad(weights, (0, -weights.shape[-1] % column_size))
        weights = filled.unflatten(-1, (-1, column_size)).sum(-1)
    if row_size > 1:
        weights = torch.stack([rows.mean(1) for rows in weights.split(row_size, 1)], 1)
    return weights


# Distances from the query, the farthest of each bin: itself, 1, 2, up to 4, up to 8 ...
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 2**62)


def bin_of(away: Tensor) -> Tensor:
    """The number of the bin of a distance, key minus query: the farthest before the query is 0.

    >>> bin_of(torch.tensor([-3, -1, 0, 1, 5])) - len(EDGES)
    tensor([-3, -1,  0,  1,  4])
    """
    edges = torch.tensor(EDGES, device=away.device)
    return away.sign() * (torch.bucketize(away.abs(), edges) + (away != 0).long()) + len(EDGES)
