"""A readable summary of distances: the nearest twin of each head, clusters of similar heads, a map."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.common.preserved_state import untouched

# More groups than this are no summary.
MOST = 20


class Layout(NamedTuple):
    """Where each head stands.

    twin: (heads,) the number of the nearest head, -1 where there is none.
    cluster: (heads,) the number of its group, from 0, the largest first.
    silhouette: (heads,) how much better its own group fits than the next one, from -1 to 1.
    position: (heads, 2) where it stands on the map; distances there are as near to the true ones as a plane
        allows.
    """

    twin: Tensor
    cluster: Tensor
    silhouette: Tensor
    position: Tensor


def layout(distance: Tensor) -> Layout:
    """Twins, groups and a map from distances (heads, heads), NaN between heads that cannot be compared.

    Heads that can be compared with each other make a map of their own.

    >>> line = torch.tensor([0.0, 0.1, 1.0, 1.1, 1.3], dtype=torch.float64)
    >>> heads = layout((line[:, None] - line).abs())
    >>> heads.twin, heads.cluster
    (tensor([1, 0, 3, 2, 3]), tensor([1, 1, 0, 0, 0]))
    >>> round((heads.position[0] - heads.position[4]).norm().item(), 4)
    1.3
    """
    size = len(distance)
    twin, cluster = torch.full((size,), -1), torch.zeros(size, dtype=torch.long)
    silhouette = torch.zeros(size, dtype=torch.float64)
    position = torch.zeros(size, 2, dtype=torch.float64)
    used = 0
    with untouched():  # to import scikit-learn draws a random number
        for heads in islands(distance):
            near = distance[heads][:, heads]
            twin[heads] = _twins(near, heads)
            groups, silhouette[heads] = _clusters(near)
            cluster[heads] = groups + used
            used += int(groups.max()) + 1
            position[heads] = _map(near)
    return Layout(twin, cluster, silhouette, position)


def islands(distance: Tensor) -> list[Tensor]:
    """The heads that can be compared with each other, as lists of their numbers; a head alone is one, too.

    >>> islands(torch.tensor([[0.0, 1.0, torch.nan], [1.0, 0.0, torch.nan], [torch.nan, torch.nan, 0.0]]))
    [tensor([0, 1]), tensor([2])]
    """
    remaining = list(range(len(distance)))
    groups = []
    while remaining:
        comparable = distance[remaining[0]].isfinite()
        members = [remaining[0], *(head for head in remaining[1:] if comparable[head])]
        remaining = [head for head in remaining if head not in members]
        groups.append(torch.tensor(members))
    return groups


def _twins(near: Tensor, heads: Tensor) -> Tensor:
    if len(heads) == 1:
        return torch.tensor([-1])
    return heads[near.clone().fill_diagonal_(math.inf).argmin(1)]


def _clusters(near: Tensor) -> tuple[Tensor, Tensor]:
    """Ward's linkage, cut where the mean silhouette is largest, and the silhouette of each head."""
    one, none = torch.zeros(len(near), dtype=torch.long), torch.zeros(len(near), dtype=torch.float64)
    if len(near) < 3 or not near.any():
        return one, none
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform
    from sklearn.metrics import silhouette_samples

    values = near.numpy()
    # average linkage splits off one odd head after another; groups are to be of some size
    tree = linkage(squareform(values, checks=False), "ward")
    best, silhouette = one, none
    for count in range(2, min(MOST, len(near) - 1) + 1):
        groups = fcluster(tree, count, "maxclust")
        if 1 < len(set(groups)) < len(near):
            scores = torch.from_numpy(silhouette_samples(values, groups, metric="precomputed"))
            if best is one or scores.mean() > silhouette.mean():
                best, silhouette = torch.from_numpy(groups).long(), scores.double()
    _, inverse, sizes = best.unique(return_inverse=True, return_counts=True)
    rank = sizes.argsort(descending=True, stable=True).argsort()
    return rank[inverse], silhouette


def _map(near: Tensor) -> Tensor:
    """Multidimensional scaling into a plane, started from the classical solution: (heads, 2)."""
    position = torch.zeros(len(near), 2, dtype=torch.float64)
    if len(near) == 2:
        position[1, 0] = near[0, 1]
    if len(near) < 3 or not near.any():
        return position
    from sklearn.manifold import MDS

    mds = MDS(2, metric="precomputed", init="classical_mds", n_init=1, random_state=0)
    return torch.from_numpy(mds.fit_transform(near.numpy())).double()


def stress(distance: Tensor, position: Tensor) -> float:
    """How far the distances on a map (heads, 2) are off: the root of the squared errors over the squared
    distances, 0 for a perfect map.

    >>> stress(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    0.5
    """
    finite = distance.isfinite()
    off = (torch.cdist(position, position) - distance)[finite].square().sum()
    return (off / distance[finite].square().sum()).sqrt().item() if distance[finite].any() else 0.0
