"""orthogonal_heads: heads whose projections are orthogonal to each other, as a constraint on any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize

from manyheads.capture.site import Unverified
from manyheads.capture.weights import ROLES, Part, Projections
from manyheads.common.errors import check_choices
from manyheads.common.types import Batch
from manyheads.heads.diversity.weight_subspaces import head_projections
from manyheads.models.probe_batch import probe_batch
from manyheads.nn.orthogonal_rows import OrthogonalRows, constrained

# An axis of a weight, and which indices along it are those of each head.
Rows = tuple[int, tuple[tuple[int, ...], ...]]


def orthogonal_heads(
    model: nn.Module,
    roles: Sequence[str] = ("query", "key"),
    batch: Batch | None = None,
    *,
    unverified: Unverified = "refuse",
) -> nn.Module:
    """Constrain the heads of each site to read (or write) subspaces that are orthogonal to each other.

    Whatever an optimiser does to the parameters, the weights that the model uses are orthogonal between heads
    (cosines of rows below 1e-5 in float32). The scale of a head, and what its rows are to each other, stay
    free. It is a parametrisation of torch (`torch.nn.utils.parametrize`): with W_h the rows of head h,
    Q = (W W')^(-1/2) W of all heads, each divided by its norm first, the model uses W_h Q_h' Q_h, and the
    gradient flows through that to W. Weights that are orthogonal already stay as they are.

    Parameters
    ----------
    model: any torch.nn.Module; it is changed. Call this before the optimiser is made, or after: parameters
        stay the same objects.
    roles: some of ``query``, ``key``, ``value`` (what heads read) and ``output`` (what they write).
        Key heads that are shared by a group count once.
    batch: a small input of the model: a dict (passed by name), a tuple or list (passed in order), or a
        tensor. transformers models need none.
    unverified: ``"allow"`` to constrain heads at unverified sites, too (`Site.verified`).

    Returns
    -------
    The model. `save`, `cut` and `train` make the weights plain on a copy; `fold_orthogonal`
    does it in place.

    Raises
    ------
    ValueError where heads times their width exceed what they read (they cannot be orthogonal then), where the
    weights of a role are not rows of one weight, are shared with something else, or are not trainable.

    See Also
    --------
    diversity_terms : the same as a term of the loss.
    fold_orthogonal : removes the constraint.
    diversity : how orthogonal heads are.

    References
    ----------
    Li et al. 2018, Multi-head attention with disagreement regularization.

    Examples
    --------
    >>> import manyheads as mh
    >>> model, ids = mh.Encoder(12, heads=3, layers=2, vocabulary=97), torch.randint(97, (2, 11))
    >>> model = mh.orthogonal_heads(model, batch=ids)
    >>> weight = model.blocks[0].attention.query.weight                    # (heads * d_key, d_model)
    >>> (weight[:4] @ weight[4:].T).abs().max().item() < 1e-6
    True
    """
    check_choices("roles", roles, ROLES)
    if next(constrained(model), None) is not None:
        raise ValueError("model: its heads are already orthogonal; fold_orthogonal removes the constraint")
    weights = head_projections(model, probe_batch(model) if batch is None else batch)
    for projections in weights.values():
        projections.site.check("orthogonal_heads", unverified)
    groups: dict[str, dict[Rows, str]] = {}  # by parameter: the rows of heads, and whose they are
    for name, projections in weights.items():
        for role in roles:
            heads = unique_parts(projections, role)
            if len(heads) > 1 or not heads[0]:
                parameter, rows = _rows(model, name, role, heads, projections)
                groups.setdefault(parameter, {}).setdefault(rows, f"{role} of {name!r}")
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable & set(groups):
        raise ValueError(
            f"model: it has no trainable heads (two or more at a site, whose {' or '.join(roles)} weights "
            "require a gradient), so there is nothing to constrain; expected some"
        )
    for parameter in trainable & set(groups):
        _check_apart(parameter, groups[parameter])
    for parameter in sorted(trainable & set(groups)):
        path, _, attribute = parameter.rpartition(".")
        module = model.get_submodule(path)
        parametrisation = OrthogonalRows(list(groups[parameter]), list(module._parameters))
        parametrize.register_parametrization(module, attribute, parametrisation)
    return model


def unique_parts(projections: Projections, role: str) -> list[tuple[Part, ...]]:
    """The weights of each head of a site in one role; those that a group of heads shares, once."""
    return list(dict.fromkeys(getattr(head, role) for head in projections.heads))


def _rows(
    model: nn.Module, site: str, role: str, heads: Sequence[tuple[Part, ...]], projections: Projections
) -> tuple[str, Rows]:
    """The parameter that holds the heads of a role, and their rows in it; a ValueError says why not."""
    what = f"orthogonal_heads: the {role} weights of {site!r}"
    if not all(heads):
        behind = f" ({projections.tied[0]}: all heads depend on all of it)" if projections.tied else ""
        raise ValueError(
            f"{what} do not belong to heads one by one{behind}, so that they cannot be kept apart; expected "
            "other roles"
        )
    parameters = {part.parameter for parts in heads for part in parts}
    if any(len(parts) > 1 for parts in heads) or len(parameters) > 1:
        raise ValueError(
            f"{what} are in several parameters ({', '.join(sorted(parameters)[:3])}); expected rows of one"
        )
    parameter, axis = heads[0][0].parameter, heads[0][0].axis
    names = _names(model, parameter)
    if len(names) > 1:
        raise ValueError(f"{what} are shared: {' and '.join(names)} are one; expected separate weights")
    if "parametrizations" in parameter.split("."):
        raise ValueError(f"{what} are computed from {parameter} already; expected plain weights")
    rows = tuple(parts[0].indices for parts in heads)
    width, size = len(rows[0]), dict(_tensors(model))[parameter].shape
    if any(len(row) != width for row in rows) or len({i for row in rows for i in row}) < width * len(rows):
        raise ValueError(f"{what} overlap, or are not of one width; expected equal parts of {parameter}")
    reads = torch.Size(n for number, n in enumerate(size) if number != axis).numel()
    if len(rows) * width > reads:
        raise ValueError(
            f"{what} cannot be orthogonal: {len(rows)} heads of {width} need {len(rows) * width} dimensions, "
            f"and there are {reads}; expected heads x d_key up to {reads}: fewer or narrower heads, fewer "
            "key heads, or other roles"
        )
    return parameter, (axis, rows)


def _check_apart(parameter: str, groups: Mapping[Rows, str]) -> None:
    """Raise where two roles or sites use the same rows of a parameter, but not in the same way."""
    used: dict[tuple[int, int], str] = {}
    axes = {axis for axis, _ in groups}
    for (axis, heads), user in groups.items():
        for index in (index for head in heads for index in head):
            other = used.setdefault((axis, index), user)
            if other != user or len(axes) > 1:
                raise ValueError(
                    f"orthogonal_heads: {' and '.join(sorted(set(groups.values()))[:2])} share rows of "
                    f"{parameter} in different ways, which cannot be orthogonal in both; expected other roles"
                )


def _names(model: nn.Module, parameter: str) -> list[str]:
    """All names of a parameter or buffer, one for each module that has it."""
    tensors = _tensors(model)
    this = dict(tensors)[parameter]
    names = [name for name, tensor in tensors if tensor is this]
    modules = {id(model.get_submodule(name.rpartition(".")[0])): name for name in names}
    return list(modules.values())


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
