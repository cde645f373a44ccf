"""From sums over batches to a table of heads, with its matrices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.capture.weights import Projections
from manyheads.common.types import JsonObject
from manyheads.heads.diversity.accumulators import Sums
from manyheads.heads.diversity.map_layout import layout
from manyheads.heads.diversity.output_moments import Moments
from manyheads.heads.diversity.pair_sums import cosines
from manyheads.heads.diversity.weight_subspaces import output_columns, subspace_matrices
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.table import HeadTable, Row
from manyheads.heads.watch import labels_of, rows_of


@dataclass
class ComparedHeads:
    """Heads compared on some batches: sums, which add up with those of other batches, and what the weights
    show.

    Attributes
    ----------
    model: a fingerprint.
    sites: the number of heads of each.
    rows, labels: as in a HeadTable.
    measures: those that were taken.
    sums: over batches.
    subspaces: matrices (heads, heads) from weights alone, of heads whether they met or not.
    columns: for each site what its output projection makes of the heads, (d_model, heads * d_value);
        None where contributions were not measured.
    """

    model: str
    sites: dict[str, int]
    rows: list[Row]
    labels: dict[str, list[str]]
    measures: list[str]
    sums: Sums
    subspaces: dict[str, Tensor]
    columns: dict[str, Tensor] | None

    def merge(self, others: ComparedHeads) -> None:
        """Add what was compared on other batches."""
        self.sums.merge(others.sums)
        if set(others.subspaces) != set(self.subspaces) or set(others.columns or ()) != set(
            self.columns or ()
        ):
            raise ValueError(
                "merge: which weights belong to which head was found for one part of the text and not for "
                "another; leave out the measures subspaces and contributions"
            )

    def document(self) -> dict[str, object]:
        """All of it as nested dictionaries of tensors and plain values, to be saved."""
        return vars(self) | {"rows": [tuple(row) for row in self.rows], "sums": self.sums.document()}

    @classmethod
    def restored(cls, document: JsonObject) -> ComparedHeads:
        """What `document` gave."""
        rows = [Row(*row) for row in document["rows"]]
        return cls(**document | {"rows": rows, "sums": Sums.restored(document["sums"])})


def compared(
    model: nn.Module,
    sites: Sequence[Site],
    sums: Sums,
    projections: Mapping[str, Projections],
    measures: Sequence[str],
) -> ComparedHeads:
    """The sums, with what of the model `table_of_pairs` needs besides them."""
    sites = [site for site in sites if site.name in sums.first]
    subspaces, columns = {}, None
    if "subspaces" in measures and projections:
        subspaces = subspace_matrices(model, sites, projections)
    if "contributions" in measures and projections:
        columns = output_columns(model, projections, sums.moments.shapes)
    heads = {site.name: site.heads for site in sites}
    return ComparedHeads(
        fingerprint(model), heads, rows_of(model, sites), labels_of(sites), list(measures), sums, subspaces,
        columns,
    )  # fmt: skip


def table_of_pairs(parts: ComparedHeads) -> HeadTable:
    """The sums as a table."""
    sites, rows, sums, measures = parts.sites, parts.rows, parts.sums, parts.measures
    moments = sums.moments
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
    if parts.subspaces:
        met = sums.met
        matrices |= {name: torch.where(met, x, math.nan) for name, x in parts.subspaces.items()}
    if parts.columns is not None:
        projected = parts.columns

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
    return HeadTable(rows, tokens, columns, parts.model, labels=labels | parts.labels, matrices=matrices)


def _between(
    sites: Mapping[str, int],
    moments: Moments,
    measure: Callable[[str, str], Tensor],
    measured: Sequence[str],
) -> Tensor:
    """A matrix (heads, heads) from what is measured between two sites, NaN where they cannot be compared."""
    names, total = list(sites), sum(sites.values())
    matrix = torch.full((total, total), math.nan, dtype=torch.float64)
    ends = torch.tensor([0, *sites.values()]).cumsum(0).tolist()
    for i, one in enumerate(names):
        for j, other in enumerate(names[i:], i):
            if {one, other} <= set(measured) and moments.comparable(one, other):
                block = measure(one, other).cpu()
                matrix[ends[i] : ends[i + 1], ends[j] : ends[j + 1]] = block
                matrix[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = block.T
    return matrix


def _laid_out(
    rows: Sequence[Row], matrices: Mapping[str, Tensor], counts: Tensor
) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
    """The columns that follow from distances: twins, groups, places on the map."""
    names = head_names(rows)
    head_map = layout(matrices["js"])
    pair = torch.arange(len(rows)), head_map.twin.clamp(min=0)
    mean, error, count = (x[pair] for x in (matrices["js"], matrices["js_se"], counts))
    # count, sum and sum of squares that have this mean and this standard error
    squares = count * mean**2 + (error**2).nan_to_num() * count * (count - 1)
    distance = torch.stack((count, count * mean, squares))
    distance[:, head_map.twin < 0] = 0.0
    columns = {"twin_distance": distance, "cluster": single(head_map.cluster)}
    columns["silhouette"] = single(head_map.silhouette)
    columns |= {"x": single(head_map.position[:, 0]), "y": single(head_map.position[:, 1])}
    return {"twin": [names[twin] if twin >= 0 else "" for twin in head_map.twin.tolist()]}, columns


def _ranks(sites: Mapping[str, int], moments: Moments) -> dict[str, Tensor]:
    ranks = []
    for site, heads in sites.items():
        rank = moments.rank(site) if site in moments.shapes else (math.nan, math.nan)
        ranks += [rank] * heads
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
