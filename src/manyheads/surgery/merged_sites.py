"""The key heads of a model become equal within groups, in place: what a merged model is held to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.capture.weights import Head, Part, Projections
from manyheads.common.compare_outputs import relative_difference, seeded_evaluation, tolerance
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.models.changes import get_tensor
from manyheads.surgery.head_alignment import Freedom, HeadWeights, freedom
from manyheads.surgery.head_counts import OutputCheck
from manyheads.surgery.regions import regions_of
from manyheads.surgery.shared_heads import groups_by_distance, lost_energy, shared_matrices, square_root
from manyheads.surgery.verify import capture

How = Literal["aligned", "mean", "best"]
Groups = dict[str, list[list[int]]]  # of key heads, by site
Freedoms = dict[str, dict[str, Freedom]]  # by site, and by role, "key" and "value"
READERS = {"key": "query", "value": "output"}


class KeyHeads:
    """The key heads of one site: their matrices, what reads them, and how they may be changed.

    freedom: by role, "key" and "value".
    """

    def __init__(
        self, weights: HeadWeights, moments: Mapping[str, Tensor], freedoms: dict[str, Freedom]
    ) -> None:
        self.weights, self.freedom, self._moments = weights, freedoms, moments
        self._roots: dict[str, Tensor] = {}

    def matrices(self, role: str, key_heads: list[int]) -> list[Tensor]:
        """W_j (width, inputs) for each key head."""
        return [self.weights.get(role, self.weights.groups[each][0]) for each in key_heads]

    def importances(self, role: str, key_heads: list[int]) -> list[Tensor]:
        """The second moments (width, width) of what reads each key head."""
        reader = READERS[role]
        result = []
        for each in key_heads:
            rows = [self.weights.get(reader, head) for head in self.weights.groups[each]]
            if reader == "query":
                moments = self.moments(reader, rows[0].shape[1])
                result.append(torch.stack([one @ moments @ one.T for one in rows]).sum(0))
            else:
                result.append(torch.stack([one @ one.T for one in rows]).sum(0))
        return result

    def moments(self, role: str, inputs: int) -> Tensor:
        """The second moments of what makes a role; the identity where they are unknown."""
        whole = self._moments.get(self.weights.parameter(role).rpartition(".")[0])
        if whole is None or inputs not in (len(whole), len(whole) - 1):
            device = get_tensor(self.weights.model, self.weights.parameter(role)).device
            return torch.eye(inputs, dtype=torch.float64, device=device)
        return whole[:inputs, :inputs]

    def loss(self, key_heads: list[int]) -> float:
        """What merging these key heads loses: the shares of the keys' and of the values' energy."""
        return sum(
            lost_energy(*self._problem(role, key_heads)) for role in READERS if self.weights.plain(role)
        )

    def join(self, key_heads: list[int], how: How) -> None:
        """Make key heads equal, and adjust what reads them."""
        for role, reader in READERS.items():
            if not (self.weights.plain(role) and self.weights.plain(reader)):
                self._copy(role, key_heads)
                continue
            matrices, importances, root, freedom_ = self._problem(role, key_heads)
            if how == "aligned":
                shared_matrix, maps = shared_matrices(matrices, importances, root, freedom_)
            else:
                shared_matrix = torch.stack(matrices).mean(0) if how == "mean" else _closest(matrices, root)
                maps = []
            for number, key_head in enumerate(key_heads):
                heads = self.weights.groups[key_head]
                self.weights.put(role, heads[0], shared_matrix)
                for head in heads if maps else ():
                    self.weights.put(reader, head, maps[number].T @ self.weights.get(reader, head))
            self._average(role, key_heads)

    def _problem(self, role: str, key_heads: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor, Freedom]:
        matrices = self.matrices(role, key_heads)
        if role not in self._roots:
            self._roots[role] = square_root(self.moments(role, matrices[0].shape[1]))
        return matrices, self.importances(role, key_heads), self._roots[role], self.freedom[role]

    def _average(self, role: str, key_heads: list[int]) -> None:
        """Average what takes part in making keys and is no product, as the weights of a norm of each head."""
        for parts in zip(*(self._head(each).beside.get(role, ()) for each in key_heads), strict=False):
            if len({(part.parameter, len(part.indices)) for part in parts}) == 1:
                entries = torch.stack([_entries(self.weights.model, part) for part in parts])
                for part in parts:
                    _set_entries(self.weights.model, part, entries.mean(0))

    def _copy(self, role: str, key_heads: list[int]) -> None:
        """Give all of them the weights of the first, where these are more than one product."""
        first = self._head(key_heads[0])
        for key_head in key_heads[1:]:
            head = self._head(key_head)
            parts = (*getattr(head, role), *head.biases.get(role, ()), *head.beside.get(role, ()))
            sources = (*getattr(first, role), *first.biases.get(role, ()), *first.beside.get(role, ()))
            for part, source in zip(parts, sources, strict=False):
                if part.indices != source.indices and len(part.indices) == len(source.indices):
                    _set_entries(self.weights.model, part, _entries(self.weights.model, source))

    def _head(self, key_head: int) -> Head:
        return self.weights.projections.heads[self.weights.groups[key_head][0]]


def _entries(model: nn.Module, part: Part) -> Tensor:
    tensor = get_tensor(model, part.parameter).detach()
    return tensor.index_select(part.axis, torch.tensor(part.indices, device=tensor.device))


def _set_entries(model: nn.Module, part: Part, entries: Tensor) -> None:
    tensor = get_tensor(model, part.parameter)
    with torch.no_grad():
        tensor.index_copy_(part.axis, torch.tensor(part.indices, device=tensor.device), entries.to(tensor))


def _closest(matrices: list[Tensor], root: Tensor) -> Tensor:
    """The matrix whose outputs are closest to those of all."""

    def distance(matrix: Tensor) -> float:
        return sum(float(((other - matrix) @ root).square().sum()) for other in matrices)

    return min(matrices, key=distance)


def key_head_groups(
    model: nn.Module,
    by_site: Mapping[str, Projections],
    moments: Mapping[str, Tensor],
    wanted: Mapping[str, int],
    freedoms: Freedoms,
    grouping: str,
) -> Groups:
    """The key heads that are merged with each other, by site."""
    groups: Groups = {}
    losses = {
        name: _pair_losses(KeyHeads(HeadWeights(model, by_site[name]), moments, allowed), wanted[name])
        for name, allowed in (freedoms.items() if grouping == "loss" else ())
    }
    first: dict[str, str] = {}  # the site that decides, by the weights that make its keys
    for name, number in wanted.items():
        count = len(set(by_site[name].site.kv_heads))
        size = count // number
        decides = first.setdefault(_key_weights(by_site[name]), name)
        if decides != name:
            groups[name] = [list(group) for group in groups[decides]]
            continue
        neighbours = [list(range(start, start + size)) for start in range(0, count, size)]
        distance = losses.get(name)
        groups[name] = neighbours if distance is None else groups_by_distance(distance, number)
    return groups


def _key_weights(projections: Projections) -> str:
    """The parameter that makes the keys of a site."""
    parts = projections.heads[0].key
    if not parts or not projections.heads[0].value:
        raise ValueError(
            f"kv_heads: cannot merge at {projections.site.name!r}: no weights make its keys and values head "
            "by head; expected a linear layer for each"
        )
    return parts[0].parameter


def _pair_losses(site: KeyHeads, number: int) -> Tensor | None:
    count = len(site.weights.groups)
    if number in (1, count):
        return None
    distance = torch.zeros(count, count)
    for a in range(count):
        for b in range(a):
            distance[a, b] = distance[b, a] = site.loss([a, b])
    return distance


def join_key_heads(
    model: nn.Module,
    by_site: Mapping[str, Projections],
    moments: Mapping[str, Tensor],
    groups: Groups,
    freedoms: Freedoms,
    how: How,
) -> None:
    """Make the key heads of each group equal, in place."""
    for name, allowed in freedoms.items():
        site = KeyHeads(HeadWeights(model, by_site[name]), moments, allowed)
        for group in groups[name]:
            site.join(group, how)


def find_freedoms(
    model: nn.Module, by_site: Mapping[str, Projections], names: Iterable[str], batches: Sequence[Batch]
) -> Freedoms:
    """How the keys and values of these sites may be changed, by site and role; one site for each module
    whose key weights are its own.

    batches: to try the changes on. Rotary positions turn some coordinates so slowly that a short batch does
        not show it.
    """
    regions = regions_of({name: by_site[name] for name in names})
    captured = [capture(model, batch, {}, regions)[0] for batch in batches]
    freedoms: Freedoms = {}
    guess: dict[str, Freedom] = {}
    done: set[str] = set()
    for path, region in regions.items():
        calls = [call for by_path in captured for call in by_path[path]]
        holds = OutputCheck(model.get_submodule(path), calls, 10 * tolerance(model))
        for name in region.sites:
            if _key_weights(by_site[name]) in done:
                continue
            done.add(_key_weights(by_site[name]))
            weights = HeadWeights(model, by_site[name])
            guess = {role: freedom(weights, role, holds, guess.get(role)) for role in READERS}
            freedoms[name] = guess
    return freedoms


def reorder(model: nn.Module, example: Batch, by_site: Mapping[str, Projections], groups: Groups) -> bool:
    """Order the heads of a model, in place, so that the key heads of each group follow one another. The
    groups then have the new numbers. Returns whether that was possible: what is set for each head and is no
    weight cannot be reordered.
    """
    orders = {name: [each for group in groups[name] for each in group] for name in groups}
    changed = {name: order for name, order in orders.items() if order != sorted(order)}
    if not changed:
        return True
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    with seeded_evaluation(model):
        expected = run(model, example)
        try:
            permuted: set[str] = set()
            for name, order in changed.items():
                _permute(model, by_site[name], order, permuted)
            off = relative_difference(expected, run(model, example))
        except ValueError:
            off = float("inf")
    if off > 10 * tolerance(model):
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                tensor.copy_(before[name])
        return False
    numbers = dict(getattr(model, "original_heads", None) or {})
    for name, order in changed.items():
        heads = _head_order(by_site[name], order)
        present = numbers.get(name, list(range(len(heads))))
        numbers[name] = [present[head] for head in heads]
        size = len(order) // len(groups[name])
        groups[name] = [list(range(start, start + size)) for start in range(0, len(order), size)]
    setattr(model, "original_heads", numbers)  # noqa: B010
    return True


def _head_order(projections: Projections, order: list[int]) -> list[int]:
    """The order of heads that gives this order of key heads."""
    kv_heads = projections.site.kv_heads
    members = {key_head: [h for h, kv in enumerate(kv_heads) if kv == key_head] for key_head in order}
    heads = list(range(len(kv_heads)))
    for new, old in enumerate(order):
        for position, head in zip(members[new], members[old], strict=True):
            heads[position] = head
    return heads


def _permute(model: nn.Module, projections: Projections, order: list[int], done: set[str]) -> None:
    """Reorder the entries of every parameter of a site, but of those in ``done``, which another site has."""
    heads = _head_order(projections, order)
    for name, (axis, users) in projections.users.items():
        if name in done:
            continue
        done.add(name)
        positions: dict[frozenset[int], list[int]] = {}
        for index, using in enumerate(users):
            positions.setdefault(using, []).append(index)
        indices = list(range(len(users)))
        for using, spots in positions.items():
            source = positions.get(frozenset(heads[head] for head in using), [])
            if len(source) != len(spots):
                raise ValueError(f"{name} cannot be reordered")
            for spot, entry in zip(spots, source, strict=True):
                indices[spot] = entry
        tensor = get_tensor(model, name)
        with torch.no_grad():
            tensor.copy_(tensor.index_select(axis, torch.tensor(indices, device=tensor.device)).clone())
