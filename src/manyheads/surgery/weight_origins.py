"""Where the entries of a changed model's parameters come from, so that what is kept beside them can follow:
the moments of an optimiser, running averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyheads.surgery.weight_slices import Slice

_ATTRIBUTE = "_manyheads_origins"  # of a model that cut or grow returned


@dataclass(frozen=True)
class WeightOrigin:
    """Where the entries of one parameter come from.

    parameter: the name of the parameter before the change; None for one without a past.
    axis: along which entries were chosen.
    indices: for each entry along ``axis``, the entry before; None for all of them as they were.
    new: the positions, along ``axis``, of entries without a past.
    """

    parameter: str | None
    axis: int = 0
    indices: tuple[int, ...] | None = None
    new: tuple[int, ...] = ()


def origins(model: nn.Module) -> dict[str, WeightOrigin]:
    """Where the parameters of a model come from, by name, for the cut or grow that made it.

    Examples
    --------
    >>> import manyheads as mh
    >>> layer, x = mh.MultiHeadAttention(6, heads=3), torch.randn(2, 5, 6)
    >>> origins(mh.cut(layer, {0: [1]}, x))["output.weight"]
    WeightOrigin(parameter='output.weight', axis=1, indices=(0, 1, 4, 5), new=())
    >>> origins(mh.grow(layer, {0: 1}, x))["query.bias"]
    WeightOrigin(parameter='query.bias', axis=0, indices=(0, 1, 2, 3, 4, 5, 4, 5), new=(6, 7))
    """
    noted: dict[str, WeightOrigin] | None = getattr(model, _ATTRIBUTE, None)
    if noted is None:
        raise ValueError(
            f"model: expected what cut or grow returned, got a {type(model).__name__} that neither "
            "of them returned"
        )
    return dict(noted)


def carried(before: Tensor, origin: WeightOrigin) -> Tensor:
    """A tensor of the shape of a parameter before a change, such as its moments, brought to the shape that
    the parameter has now; zeros where it is new.

    >>> carried(torch.tensor([5.0, 6.0]), WeightOrigin("bias", 0, (0, 1, 1), new=(2,)))
    tensor([5., 6., 0.])
    """
    if origin.indices is None:
        return before.clone()
    after = before.index_select(origin.axis, torch.tensor(origin.indices, device=before.device))
    return after.index_fill_(
        origin.axis, torch.tensor(origin.new, dtype=torch.long, device=before.device), 0.0
    )


def note_origins(
    before: nn.Module,
    after: nn.Module,
    replaced: Mapping[str, WeightOrigin],
    copied: Mapping[str, str],
    sliced: Mapping[str, Slice],
) -> None:
    """Keep the origins in a changed model.

    before: the model that was changed.
    replaced: of parameters in modules that were replaced, before any slices.
    copied: ``{module path: module path}``, as in `Changes`.
    """
    names = {name for name, _ in before.named_parameters()}
    noted = {}
    for name, _ in after.named_parameters():
        origin = replaced.get(name) or WeightOrigin(name if name in names else _source(name, copied, names))
        taken = sliced.get(name)
        if taken is not None:
            indices = origin.indices
            chosen = tuple(index if indices is None else indices[index] for index in taken.indices)
            origin = replace(origin, axis=taken.axis, indices=chosen)
        noted[name] = origin
    setattr(after, _ATTRIBUTE, noted)


def mark_new(model: nn.Module, sliced: Mapping[str, Slice]) -> None:
    """Note that the entries that came twice are without a past."""
    noted = origins(model)
    for name, taken in sliced.items():
        if name in noted:
            noted[name] = replace(noted[name], new=tuple(taken.copies))
    setattr(model, _ATTRIBUTE, noted)


def _source(name: str, copied: Mapping[str, str], names: set[str]) -> str | None:
    """The parameter that one in a copied module was copied from."""
    sources = (
        source + name.removeprefix(path) for path, source in copied.items() if name.startswith(f"{path}.")
    )
    return next((source for source in sources if source in names), None)


def origins_in_torch_attention(path: str, module: nn.MultiheadAttention) -> dict[str, WeightOrigin]:
    """Where the parameters of the module that replaces an nn.MultiheadAttention come from.

    >>> origins_in_torch_attention("attn", nn.MultiheadAttention(2, 1))["attn.key.bias"]
    WeightOrigin(parameter='attn.in_proj_bias', axis=0, indices=(2, 3), new=())
    """
    prefix = f"{path}." if path else ""
    noted = {
        f"{prefix}output.{kind}": WeightOrigin(f"{prefix}out_proj.{kind}") for kind in ("weight", "bias")
    }
    width = module.embed_dim
    for number, role in enumerate(("query", "key", "value")):
        rows = tuple(range(number * width, (number + 1) * width))
        packed = WeightOrigin(f"{prefix}in_proj_weight", 0, rows)
        noted[f"{prefix}{role}.weight"] = (
            packed if module.in_proj_weight is not None else WeightOrigin(f"{prefix}{role[0]}_proj_weight")
        )
        noted[f"{prefix}{role}.bias"] = WeightOrigin(f"{prefix}in_proj_bias", 0, rows)
    return noted
