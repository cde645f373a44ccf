"""From sums over batches to a table of heads, with its matrices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.capture.weights import Projections
from manyheads.heads.diversity.accumulators import Sums
from manyheads.heads.diversity.map_layout import layout
from manyheads.heads.diversity.output_moments import Moments
from manyheads.heads.diversity.pair_sums import cosines
from manyheads.heads.diversity.weight_subspaces import output_columns, subspace_matrices
from manyheads.heads.table import HeadTable, Row
from manyheads.heads.watch import fingerprint, labels_of, rows_of


def table(
    model: nn.Module,
    sites: Sequence[Site],
    sums: Sums,
    projections: Mapping[str, Projections],
    measures: Sequence[str],
) -> HeadTable:
    """The sums as a table."""
    sites = [site for site in sites if site.name in sums.first]
    rows, moments = rows_of(model, sites), sums.moments
    matrices: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    labels: dict[str, list[str]] = {}
    if "attention" in measures:
        matrices |= {"js": sums.rows.mean("js"), "js_se": sums.rows.error("js")}
        matrices |= {"js_divergence": sums.rows.mean("divergence")}
        matrices |= {"overlap": sums.rows.mean("overlap"), "overlap_se": sums.rows.error("overlap")}
        labels, columns = _laid_out(rows, matrices, sums.rows.pairs["rows"])
    if "outputs" in measures:
        matrices["cka"] = cosines(_between(sites, moments, moments.dependence, list(moments.shapes)))
        columns |= _ranks(sites, moments)
    if "subspaces" in measures and projections:
        matrices |= subspace_matrices(model, sites, projections, sums.met)
    if "contributions" in measures and projections:
        projected = output_columns(model, projections, moments.shapes)

        def contribution(one: str, other: str) -> Tensor:
            return moments.contribution(one, other, (projected[one], projected[other]))

        matrices["contribution_cosine"] = cosines(_between(sites, moments, contribution, list(projected)))
    if bool(sums.pairs["gradient meetings"].any()):
        cosine = cosines(sums.pairs["gradients"])
        matrices["gradient_cosine"] = sums.pairs.where_always("gradient meetings", cosine)
    if moments.too_wide:
        warnings.warn(
            "diversity: the outputs of all layers are too wide to compare across layers; cka and "
            "contribution_cosine are given within each layer only",
            stacklevel=3,
        )
    tokens = torch.tensor([sums.tokens[row.site] for row in rows])
    return HeadTable(
        rows, tokens, columns, fingerprint(model), labels=labels | labels_of(sites), matrices=matrices
    )


def _between(
    sites: Sequence[Site], moments: Moments, measure: Callable[[str, str], Tensor], measured: Sequence[str]
) -> Tensor:
    """A matrix (heads, heads) from what is measured between two sites, NaN where they cannot be compared."""
    total = sum(site.heads for site in sites)
    matrix = torch.full((total, total), math.nan, dtype=torch.float64)
    ends = torch.tensor([0, *(site.heads for site in sites)]).cumsum(0).tolist()
    for i, one in enumerate(sites):
        for j, other in enumerate(sites[i:], i):
            if {one.name, other.name} <= set(measured) and moments.comparable(one.name, other.name):
                block = measure(one.name, other.name).cpu()
                matrix[ends[i] : ends[i + 1], ends[j] : ends[j + 1]] = block
                matrix[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = block.T
    return matrix


def _laid_out(
    rows: Sequence[Row], matrices: Mapping[str, Tensor], counts: Tensor
) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
    """The columns that follow from distances: twins, groups, places on the map."""
    names = head_names(rows)
    placed = layout(matrices["js"])
    pair = torch.arange(len(rows)), placed.twin.clamp(min=0)
    mean, error, count = (x[pair] for x in (matrices["js"], matrices["js_se"], counts))
    # count, sum and sum of squares that have this mean and this standard error
    squares = count * mean**2 + (error**2).nan_to_num() * count * (count - 1)
    distance = torch.stack((count, count * mean, squares))
    distance[:, placed.twin < 0] = 0.0
    columns = {"twin_distance": distance, "cluster": single(placed.cluster)}
    columns["silhouette"] = single(placed.silhouette)
    columns |= {"x": single(placed.position[:, 0]), "y": single(placed.position[:, 1])}
    return {"twin": [names[twin] if twin >= 0 else "" for twin in placed.twin.tolist()]}, columns


def _ranks(sites: Sequence[Site], moments: Moments) -> dict[str, Tensor]:
    ranks = []
    for site in sites:
        rank = moments.rank(site.name) if site.name in moments.shapes else (math.nan, math.nan)
        ranks += [rank] * site.heads
    rank_all, rank_99 = torch.tensor(ranks, dtype=torch.float64).unbind(1)
    return {"rank": single(rank_all), "rank_99": single(rank_99)}


def single(values: Tensor) -> Tensor:
    """Sums (3, heads) of a column that was counted once; nothing where it is NaN.

    >>> single(torch.tensor([2.0, torch.nan]))
    tensor([[1., 0.],
            [2., 0.],
            [4., 0.]], dtype=torch.float64)
    """
    values = values.double()
    sums = torch.stack((torch.ones_like(values), values, values**2))
    return torch.where(values.isnan(), 0.0, sums)


def head_names(rows: Sequence[Row]) -> list[str]:
    """A short name for each head: ``layer.head``, or ``site:head`` where layers of several stacks share a
    number.

    >>> head_names([Row("h.0.attn", 0, 3, 3, 3, "causal")])
    ['0.3']
    """
    if len({row.site for row in rows}) == len({row.layer for row in rows}):
        return [f"{row.layer}.{row.head}" for row in rows]
    return [f"{row.site}:{row.head}" for row in rows]
