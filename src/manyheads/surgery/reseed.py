"""Starting heads anew, in place: other directions, and nothing reads them yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.capture.weights import Part, Projections, weights
from manyheads.models.changes import get_tensor
from manyheads.surgery.in_place import Average, averaged_model, set_entries
from manyheads.surgery.weight_slices import readers

_MAKERS = ("query", "key", "value")


def reseed(
    model: nn.Module,
    projections: Mapping[str, Projections],
    heads: Mapping[str, list[int]],
    *,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    averages: Sequence[Average] = (),
) -> None:
    """Give heads new queries, keys and values, and let nothing read them yet: as if they were silenced.

    New directions are orthogonal to those of the heads that stay, where the width leaves room for that, and
    as long as theirs. Keys and values that other heads share stay. Moments of what is new are zero.

    Parameters
    ----------
    model: changed in place.
    projections: its weights by head, from `capture.weights.projections`.
    heads: ``{site: [head numbers]}``.
    seed: of the random numbers.
    optimizer, averages: what follows, as for `become`.

    Raises
    ------
    ValueError before anything changes, for a head whose queries or readers belong to others, too.

    Examples
    --------
    >>> import manyheads as mh
    >>> from manyheads.capture.weights import projections
    >>> layer, x = mh.MultiHeadAttention(6, heads=3), torch.randn(2, 5, 6)
    >>> reseed(layer, projections(layer, x), {"": [1]})
    >>> layer.output.weight[:, 2:4].abs().max().item()
    0.0
    >>> query = layer.query.weight
    >>> (query[2:4] @ query[[0, 1, 4, 5]].T).abs().max().item() < 1e-6
    True
    """
    generator = torch.Generator().manual_seed(seed)
    entries: list[tuple[Part, Tensor]] = []
    for site, numbers in heads.items():
        entries += _new_entries(model, projections[site], numbers, generator)
    for part, values in entries:
        set_entries(get_tensor(model, part.parameter), part.axis, part.indices, values, optimizer)
        for average in averages:
            tensor = (
                get_tensor(averaged_model(average), part.parameter)
                if isinstance(average, nn.Module)
                else average[part.parameter]
            )
            set_entries(tensor, part.axis, part.indices, values)


def _new_entries(
    model: nn.Module, of_site: Projections, numbers: list[int], generator: torch.Generator
) -> list[tuple[Part, Tensor]]:
    """The entries of parameters that begin anew, and their values."""
    others = [head for head in range(len(of_site.heads)) if head not in numbers]
    entries: list[tuple[Part, Tensor]] = []
    for number in numbers:
        head, reading = of_site.heads[number], readers(of_site, number)
        shared = {part for other in others for part in _split(readers(of_site, other))}
        if not reading or not head.query or shared & set(_split(reading)):
            raise ValueError(f"heads: head {number} of {of_site.site.name!r} cannot be reseeded alone")
        for role in _MAKERS:
            for part in getattr(head, role):
                rest = [p for other in others for p in getattr(of_site.heads[other], role)]
                rest = [p for p in rest if (p.parameter, p.axis) == part[:2]]
                if set(_split(rest)) & set(_split([part])):
                    continue  # others of its group use them
                drawn = _directions(weights(model, [part]), _rows(model, rest), generator)
                entries.append((part, _shaped(model, part, drawn)))
            for part in head.biases.get(role, ()):
                rest = [p for other in others for p in of_site.heads[other].biases.get(role, ())]
                if not set(_split(rest)) & set(_split([part])):
                    entries.append((part, torch.zeros_like(_entries(model, part))))
        entries += [(part, torch.zeros_like(_entries(model, part))) for part in reading]
    return entries


def _split(parts: Sequence[Part]) -> list[tuple[str, int, int]]:
    return [(part.parameter, part.axis, index) for part in parts for index in part.indices]


def _rows(model: nn.Module, parts: list[Part]) -> Tensor | None:
    return weights(model, list(dict.fromkeys(parts))) if parts else None


def _directions(old: Tensor, others: Tensor | None, generator: torch.Generator) -> Tensor:
    """Rows (width, inputs) orthogonal to other rows, if they leave room, and as long as theirs."""
    drawn = torch.randn(old.shape, generator=generator, dtype=torch.float64)
    present = (old if others is None else others).double().cpu()
    length = present.norm(dim=1).mean()
    if others is not None and len(present) + len(drawn) <= drawn.shape[1]:
        basis: Tensor = torch.linalg.qr(present.T).Q  # (inputs, rows)
        drawn = drawn - drawn @ basis @ basis.T
    directions: Tensor = drawn / drawn.norm(dim=1, keepdim=True) * length
    return directions


def _entries(model: nn.Module, part: Part) -> Tensor:
    tensor = get_tensor(model, part.parameter).detach()
    return tensor.index_select(part.axis, torch.tensor(part.indices, device=tensor.device))


def _shaped(model: nn.Module, part: Part, rows: Tensor) -> Tensor:
    """Rows (width, inputs) in the shape of the parameter's entries."""
    entries = _entries(model, part).movedim(part.axis, 0)
    shaped: Tensor = rows.view(entries.shape).movedim(0, part.axis)
    return shaped
