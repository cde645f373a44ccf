"""Changing the heads of a model in place, while an optimiser trains it.

`cut` and `grow` return copies. Here a model becomes its copy: modules and parameters stay the same objects,
so that references to them stay valid, and the optimiser's moments follow the weights entry by entry.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.models.changes import changes_of, get_tensor, replace_module, settle
from manyheads.surgery.weight_origins import WeightOrigin, carried, origins

# Sizes that torch's modules repeat beside their weights.
_SIZES = (
    "in_features", "out_features", "num_embeddings", "embedding_dim", "normalized_shape", "groups",
    "in_channels", "out_channels",
)  # fmt: skip
Average = MutableMapping[str, Tensor] | nn.Module


def become(
    model: nn.Module, changed: nn.Module, optimizer: Optimizer | None = None, averages: Sequence[Average] = ()
) -> None:
    """Change a model in place into the copy of it that `cut` or `grow` returned.

    Parameters
    ----------
    model: the one that was handed to `cut` or `grow`. Its modules and parameters stay the same objects;
        modules that were replaced, as nn.MultiheadAttention is, are swapped for those of the copy. Gradients
        of parameters that change are dropped.
    changed: the copy; it is left as it is.
    optimizer: its moments follow the weights, new entries have moments of zero. Parameters that vanish leave
        its groups, those that replace them join the same group.
    averages: averages of the weights that follow, too: models like ``model``, or dicts of tensors by name.

    Raises
    ------
    ValueError before anything changes, for an optimiser whose state cannot follow.

    Examples
    --------
    >>> import manyheads as mh
    >>> layer, x = mh.MultiHeadAttention(6, heads=3), torch.randn(2, 5, 6)
    >>> optimizer, weight = torch.optim.Adam(layer.parameters()), layer.output.weight
    >>> layer(x).sum().backward()
    >>> optimizer.step()
    >>> become(layer, mh.cut(layer, {0: [1]}, x), optimizer)
    >>> layer.output.weight is weight, weight.shape, optimizer.state[weight]["exp_avg"].shape
    (True, torch.Size([6, 4]), torch.Size([6, 4]))
    """
    sources = origins(changed)
    before = dict(model.named_parameters())
    moments = {} if optimizer is None else _carried_state(optimizer, before, sources)
    averaged = [_carried_average(average, model, changed, sources) for average in averages]
    _become(model, changed)
    after = dict(model.named_parameters())
    if optimizer is not None:
        _regroup(optimizer, before, after, sources)
        for name, state in moments.items():
            optimizer.state[after[name]] = state
    for average, values in zip(averages, averaged, strict=True):
        if isinstance(average, nn.Module):
            _become(averaged_model(average), changed)
            with torch.no_grad():
                for name, value in values.items():
                    get_tensor(averaged_model(average), name).copy_(value)
        else:
            average.clear()
            average.update(values)


def set_entries(
    parameter: Tensor, axis: int, indices: Iterable[int], values: Tensor, optimizer: Optimizer | None = None
) -> None:
    """Set entries of a parameter along an axis, in place, and their moments to zero.

    >>> weight = nn.Parameter(torch.ones(3, 2))
    >>> set_entries(weight, 0, [2], torch.zeros(1, 2))
    >>> weight[:, 0]
    tensor([1., 1., 0.], grad_fn=<SelectBackward0>)
    """
    index = torch.tensor(list(indices), device=parameter.device)
    with torch.no_grad():
        parameter.index_copy_(axis, index, values.to(parameter))
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for moment in state.values():
            if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                moment.index_fill_(axis, index.to(moment.device), 0.0)


def _become(model: nn.Module, changed: nn.Module) -> None:
    """Change the modules, weights and settings of a model, and the record of its changes."""
    changes = changes_of(changed)
    for path in changes.replaced:
        old, new = model.get_submodule(path), changed.get_submodule(path)
        if type(old) is not type(new):
            replace_module(model, path, copy.deepcopy(new).train(old.training))
    for path in changes.copied:
        _add_parts(model.get_submodule(path), changed.get_submodule(path))
    for name, parameter in changed.named_parameters():
        _set_data(get_tensor(model, name), parameter.detach())
    for path, module in changed.named_modules():
        _follow(model.get_submodule(path), module, changes.settings.get(path, {}))
    settle(model, changes)
    setattr(model, "original_heads", dict(getattr(changed, "original_heads", {})))  # noqa: B010


def _add_parts(module: nn.Module, changed: nn.Module) -> None:
    """Add the parts that a module has copied from another, as `changes.copy_source` does."""
    for name, part in changed._modules.items():
        if name not in module._modules and part is not None:
            module.add_module(name, copy.deepcopy(part))
    for name, value in vars(changed).items():
        if isinstance(value, bool) and name != "training":
            setattr(module, name, value)


def _set_data(tensor: Tensor, new: Tensor) -> None:
    """Set a parameter's data; gradients of another shape are dropped.

    A graph that is still alive (a loss that the caller keeps) holds the node that would take the gradient of
    the old shape. torch drops that node only when the type changes, so it is changed back and forth.
    """
    if tensor.data_ptr() == new.data_ptr():
        return
    if tensor.shape != new.shape:
        tensor.grad = None
        other = torch.float64 if tensor.dtype != torch.float64 else torch.float32
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
        tensor.data = new.clone()
    else:
        with torch.no_grad():
            tensor.copy_(new)


def _follow(module: nn.Module, changed: nn.Module, settings: Iterable[str]) -> None:
    """Give a module the buffers, sizes and per-head settings of its copy."""
    for name, buffer in changed._buffers.items():
        present = module._buffers.get(name)
        if buffer is not None and (present is None or present.shape != buffer.shape):
            module._buffers[name] = buffer.clone()
    for name in (*_SIZES, *settings):
        value = getattr(changed, name, None)
        if value is not None and not isinstance(value, nn.Parameter):
            setattr(module, name, value)


def _fresh(origin: WeightOrigin) -> WeightOrigin:
    """An origin in which entries that come twice, as those of a split head, have no past the second time:
    its values may have the opposite sign there.
    """
    seen: set[int] = set(origin.new)
    first: dict[int, int] = {}
    for position, index in enumerate(origin.indices or ()):
        if first.setdefault(index, position) != position:
            seen.add(position)
    return replace(origin, new=tuple(sorted(seen)))


def _carried_state(
    optimizer: Optimizer, before: dict[str, nn.Parameter], sources: dict[str, WeightOrigin]
) -> dict[str, dict[str, object]]:
    """The optimiser's state for every parameter after the change, by name."""
    carried_states: dict[str, dict[str, object]] = {}
    for name, origin in sources.items():
        old = None if origin.parameter is None else before[origin.parameter]
        state = {} if old is None else optimizer.state.get(old, {})
        if old is None or not state:
            continue
        past, new = _fresh(origin), {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.numel() == 1 or origin.indices is None:
                new[key] = value.clone() if isinstance(value, Tensor) and name != origin.parameter else value
            elif value.dim() == old.dim() and value.shape[origin.axis] == old.shape[origin.axis]:
                new[key] = carried(value, past)
            elif value.dim() == old.dim() and value.shape[origin.axis] == 1:  # factored along another axis
                new[key] = value
            else:
                raise ValueError(
                    f"optimizer: its state {key!r} of {origin.parameter} is {tuple(value.shape)} for a "
                    f"parameter of {tuple(old.shape)}, which cannot follow a change of heads; expected "
                    "moments shaped like the parameter, as those of SGD, Adam and AdamW"
                )
        carried_states[name] = new
    return carried_states


def _regroup(
    optimizer: Optimizer,
    before: dict[str, nn.Parameter],
    after: dict[str, nn.Parameter],
    sources: dict[str, WeightOrigin],
) -> None:
    """Parameters that vanished leave the groups; those that replace them stand where they stood."""
    present = {id(parameter) for parameter in after.values()}
    past = {id(parameter) for parameter in before.values()}
    joining: dict[int, list[nn.Parameter]] = {}
    for name, parameter in after.items():
        source = sources[name].parameter
        if id(parameter) not in past and source is not None:
            joining.setdefault(id(before[source]), []).append(parameter)
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = []
        for parameter in group["params"]:
            if id(parameter) in present or id(parameter) not in past:
                params.append(parameter)
            else:
                optimizer.state.pop(parameter, None)
            params += joining.get(id(parameter), [])
        group["params"][:] = params


def averaged_model(average: nn.Module) -> nn.Module:
    """The averaged model inside of torch's AveragedModel."""
    return average.module if isinstance(average, torch.optim.swa_utils.AveragedModel) else average


@torch.no_grad()
def _carried_average(
    average: Average, model: nn.Module, changed: nn.Module, sources: dict[str, WeightOrigin]
) -> dict[str, Tensor]:
    """An average of the weights after the change; where these became something else than what they were, as
    in new and in split heads, it begins with them.
    """
    old = _tensors(averaged_model(average)) if isinstance(average, nn.Module) else dict(average)
    live, values = _tensors(model), {}
    for name, now in _tensors(changed).items():
        origin = sources.get(name, WeightOrigin(name))  # buffers have none: those of another shape begin anew
        source = origin.parameter
        if name not in sources and name not in old:
            continue  # a buffer that is not averaged
        values[name] = now.clone()
        if source in old and source in live and old[source].shape == live[source].shape:
            past, same = carried(old[source], origin), carried(live[source], origin)
            if same.shape == now.shape:
                values[name] = torch.where(same == now, past, now)
    return values


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
