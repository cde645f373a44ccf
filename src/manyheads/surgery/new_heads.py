"""What new heads begin with: drawn anew and counting for nothing, or one of two parts of a head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from manyheads.capture.weights import Part
from manyheads.common.errors import FailedChangeError
from manyheads.models.changes import get_tensor
from manyheads.surgery.rebuild import Rebuilt
from manyheads.surgery.weight_origins import mark_new

_MAKERS = ("query", "key", "value")


def start_anew(grown: Rebuilt, seed: int) -> None:
    """Draw the queries, keys and values of new heads, as large as those of the others; nothing reads them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for role in _MAKERS:
            for name, copies, others in _copies(grown, role):
                weight, axis = get_tensor(grown.model, name), grown.sliced[name].axis
                present = weight.index_select(axis, others.to(weight.device)).float()
                scale = float(present.square().mean().sqrt()) or (weight.shape[axis] / weight.numel()) ** 0.5
                shape = [*weight.shape[:axis], len(copies), *weight.shape[axis + 1 :]]
                drawn = torch.randn(shape, generator=generator) * scale
                weight.index_copy_(axis, copies.to(weight.device), drawn.to(weight))
            for name, copies, _ in _copies(grown, role, biases=True):
                bias = get_tensor(grown.model, name)
                bias.index_fill_(grown.sliced[name].axis, copies.to(bias.device), 0.0)
        for name, before in grown.readers.items():
            entries = grown.sliced[name]
            columns = before.index_select(entries.axis, torch.tensor(entries.indices, device=before.device))
            columns.index_fill_(entries.axis, torch.tensor(entries.copies, device=before.device), 0.0)
            get_tensor(grown.model, name).copy_(columns)
    mark_new(grown.model, grown.sliced)


def divide(grown: Rebuilt, seed: int) -> None:
    """Let the two parts of a split head be read by half of its columns each, plus and minus a random part.

    Where the second part has values of its own, they are the opposite, and read with the opposite sign, if
    that gives the same: heads with the same keys and values would look like heads that share them.
    """
    _divide_columns(grown, seed, -1.0)
    _turn_values(grown)
    try:
        grown.check()
    except FailedChangeError:  # something else depends on the sign of the values
        _turn_values(grown)
        _divide_columns(grown, seed, 1.0)
        grown.check()


def _divide_columns(grown: Rebuilt, seed: int, sign: float) -> None:
    """Divide the columns that read split heads; ``sign`` is for second parts with values of their own."""
    generator = torch.Generator().manual_seed(seed)
    value_names = {name for name, _, _ in _copies(grown, "value")}
    negated_readers = {
        reader
        for site_projections in grown.projections.values()
        if any(part.parameter in value_names for head in site_projections.heads for part in head.value)
        for reader in site_projections.readers
    }
    with torch.no_grad():
        for name, old in grown.readers.items():
            entries = grown.sliced[name]
            copies = torch.tensor(entries.copies, device=old.device)
            sources = torch.tensor([entries.indices.index(entries.indices[copy]) for copy in entries.copies])
            columns = old.index_select(entries.axis, torch.tensor(entries.indices, device=old.device))
            half = columns.index_select(entries.axis, copies) / 2
            scale = float(half.float().square().mean().sqrt())
            difference = (torch.randn(half.shape, generator=generator) * scale).to(half)
            columns.index_copy_(entries.axis, sources.to(old.device), half + difference)
            columns.index_copy_(
                entries.axis, copies, (half - difference) * (sign if name in negated_readers else 1.0)
            )
            get_tensor(grown.model, name).copy_(columns)


def _turn_values(grown: Rebuilt) -> None:
    """Give the second part of each split head the opposite values."""
    with torch.no_grad():
        for biases in (False, True):
            for name, copies, _ in _copies(grown, "value", biases):
                weight, axis = get_tensor(grown.model, name), grown.sliced[name].axis
                index = copies.to(weight.device)
                weight.index_copy_(axis, index, -weight.index_select(axis, index))


def _copies(grown: Rebuilt, role: str, biases: bool = False) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The parameters that make the queries, keys or values of new heads: name, the positions of those, and
    the positions of the other heads.
    """
    indices: dict[str, set[int]] = {}
    for site_projections in grown.projections.values():
        for head in site_projections.heads:
            parts: Iterable[Part] = head.biases.get(role, ()) if biases else getattr(head, role)
            for part in parts:
                indices.setdefault(part.parameter, set()).update(part.indices)
    for name, in_role in indices.items():
        entries = grown.sliced.get(name)
        if entries is not None and entries.copies:
            copies = [position for position in entries.copies if entries.indices[position] in in_role]
            new = set(entries.copies)
            others = [p for p, index in enumerate(entries.indices) if index in in_role and p not in new]
            if copies:
                yield name, torch.tensor(copies), torch.tensor(others)
