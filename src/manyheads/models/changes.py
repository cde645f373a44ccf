"""The record of cuts and growths, as plain data: how a model differs from the first one. In heads.json."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict, cast, get_type_hints

import torch
from torch import Tensor, nn

from manyheads.common.json_files import check_fields
from manyheads.common.types import JsonObject
from manyheads.models import no_heads
from manyheads.models.no_heads import NoHeads
from manyheads.models.per_head_inputs import Pick, PickOptions
from manyheads.models.repeated_outputs import Repeat, RepeatOptions
from manyheads.models.reported_width import Width
from manyheads.models.torch_attention import TorchAttention

ATTRIBUTE = "_manyheads_changes"  # of a model whose heads were changed


class Setting(TypedDict):
    """The entries ``keep`` of ``size`` along ``axis`` are those of the present heads."""

    axis: int
    size: int
    keep: list[int]


class Count(TypedDict):
    """Heads and key heads of a site before and after, width of a key, original numbers of the cut heads."""

    before: list[int]
    after: list[int]
    d_key: int | None
    removed: list[int]


@dataclass
class Changes:
    """How a model whose heads were changed differs from one that is built from its class and config.

    shapes: of every parameter and buffer that changed.
    attributes: ``{module path: {attribute path: value}}``, such as its number of heads, if they changed.
    configs: the same for modules that read a config; each then has its own copy.
    inputs: ``{module path: [options of Pick]}`` for modules with an argument for every head.
    widths: ``{module path: options of Width}`` for modules that read the width of all heads off their input.
    repeated: ``{module path: options of Repeat}`` for projections whose outputs serve several heads.
    copied: ``{module path: module path}``: the first computes a table for itself as the second does.
    replaced: paths of modules that were nn.MultiheadAttention and are `TorchAttention` now.
    emptied: ``{module path: options of NoHeads}`` for modules that lost all heads.
    settings: ``{module path: {attribute: Setting}}`` for attributes with an entry for every head that are no
        weights.
    notes: sentences about what could not be verified.
    counts: of every site, changed or not.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    attributes: dict[str, dict[str, object]] = field(default_factory=dict)
    configs: dict[str, dict[str, object]] = field(default_factory=dict)
    inputs: dict[str, list[PickOptions]] = field(default_factory=dict)
    widths: dict[str, dict[str, int]] = field(default_factory=dict)
    repeated: dict[str, RepeatOptions] = field(default_factory=dict)
    copied: dict[str, str] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    emptied: dict[str, no_heads.Options] = field(default_factory=dict)
    settings: dict[str, dict[str, Setting]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, Count] = field(default_factory=dict)

    def follow(self, path: str, name: str, axis: int, size: int, heads: list[int]) -> None:
        """Record which heads' entries a setting of every head has, now or once more."""
        settings = self.settings.setdefault(path, {})
        if name in settings:
            size, heads = settings[name]["size"], [settings[name]["keep"][head] for head in heads]
        settings[name] = {"axis": axis, "size": size, "keep": heads}

    def removed(self) -> dict[str, list[int]]:
        """The original numbers of the cut heads, by site."""
        return {site: count["removed"] for site, count in self.counts.items() if count["removed"]}

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def changes_of(model: nn.Module) -> Changes:
    """The changes of a model, a copy; none for one that was never changed."""
    changes = getattr(model, ATTRIBUTE, None)
    return copy.deepcopy(changes) if isinstance(changes, Changes) else Changes()


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer, and everything tied to it."""
    old = get_tensor(model, name)
    new = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    for module in model.modules():
        for store in cast(list[dict[str, Tensor | None]], [module._parameters, module._buffers]):
            for key, value in store.items():
                if value is old:
                    store[key] = new
                    _set_features(module, key, old)


def get_tensor(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name."""
    path, _, key = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), key)
    return tensor


def _set_features(module: nn.Module, key: str, old: Tensor) -> None:
    """Set the sizes that torch's modules repeat beside their weight."""
    weight = module._parameters.get("weight")
    if key != "weight" or weight is None:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        if tuple(module.normalized_shape) == tuple(old.shape):  # else each head has weights of its own
            module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.groups == old.shape[0] != 1:
            module.groups = weight.shape[0]
        module.out_channels, module.in_channels = weight.shape[0], weight.shape[1] * module.groups


def set_value(owner: object, path: Sequence[str], value: object) -> None:
    """Set a number inside an attribute: ``("num_heads",)``, or ``("axes", "h")`` inside a dict or tuple."""
    first, *rest = path
    inside = owner[first] if isinstance(owner, dict) else getattr(owner, first)
    new = _with(inside, rest, value) if rest else _like(inside, value)
    if isinstance(owner, dict):
        owner[first] = new
    else:
        setattr(owner, first, new)


def _with(container: Any, path: Sequence[str], value: object) -> object:
    """A copy of a dict, list or tuple with one number in it changed."""
    first, *rest = path
    if isinstance(container, dict):
        changed = dict(container)
        changed[first] = _with(container[first], rest, value) if rest else _like(container[first], value)
        return changed
    items = list(container)
    index = int(first)
    items[index] = _with(items[index], rest, value) if rest else _like(items[index], value)
    return tuple(items) if isinstance(container, tuple) else items


def _like(old: object, new: object) -> object:
    """The new value, if it is of the type of the old one: a file must not change types."""
    if isinstance(old, tuple) and isinstance(new, list):
        new = tuple(new)  # JSON has no tuples
    if type(old) is not type(new):
        raise TypeError(f"expected {type(old).__name__} for {type(old).__name__}, got {type(new).__name__}")
    return new


def copy_config(module: nn.Module, values: dict[str, object]) -> None:
    """Give a module a copy of its config, with other values."""
    config = copy.copy(module.config)
    for name, value in values.items():
        setattr(config, name, _like(getattr(config, name), value))
    module.config = config


def copy_source(model: nn.Module, path: str, source: str) -> None:
    """Let a module compute for itself what another computed for it, with copies of that one's parts."""
    receiver, maker = model.get_submodule(path), model.get_submodule(source)
    for name, module in maker._modules.items():
        if name not in receiver._modules and module is not None:
            receiver.add_module(name, copy.deepcopy(module))
    for name, value in vars(maker).items():
        if isinstance(value, bool) and getattr(receiver, name, None) is not value and name != "training":
            setattr(receiver, name, value)


def replace_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Replace a module everywhere; returns the model, for the path '' the new module."""
    if not path:
        return module
    old = model.get_submodule(path)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = module
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoder) and any(part is module for part in parent.modules()):
            parent.use_nested_tensor = False  # its fast path reads the weights of torch's attention
    return model


def reshape(model: nn.Module, changes: Changes) -> nn.Module:
    """Reshape a new model of the same class and config as the changed one; its changed tensors are empty."""
    for path in changes.replaced:
        model = replace_module(model, path, TorchAttention.like(model.get_submodule(path)))
    for path, source in changes.copied.items():
        if path not in changes.emptied:
            copy_source(model, path, source)
    for path, options in changes.emptied.items():
        model = replace_module(model, path, NoHeads(**options))
    for name, shape in changes.shapes.items():
        set_tensor(model, name, torch.empty(shape, dtype=get_tensor(model, name).dtype))
    for path, settings in changes.settings.items():
        module = model.get_submodule(path)
        for name, setting in settings.items():
            setattr(module, name, followed(getattr(module, name), setting["axis"], setting["keep"]))
    settle(model, changes)
    return model


def followed(value: Any, axis: int, heads: list[int]) -> object:
    """The entries of a setting, by head number: those that remain, and those that come twice.

    >>> followed((5, 6, 7), 0, [0, 2]), followed({0: "a", 1: "b"}, 0, [0, 1, 1])
    ((5, 7), {0: 'a', 1: 'b', 2: 'b'})
    """
    if isinstance(value, Tensor):
        chosen = value.detach().index_select(axis, torch.tensor(heads, device=value.device))
        return nn.Parameter(chosen, value.requires_grad) if isinstance(value, nn.Parameter) else chosen
    if isinstance(value, dict):
        return {number: value[head] for number, head in enumerate(heads)}
    entries = [value[head] for head in heads]
    return entries if isinstance(value, list) else tuple(entries)


def forget(changes: Changes, path: str) -> None:
    """Drop the records of modules and tensors at and under a path that is replaced."""
    lists: tuple[JsonObject, ...] = (
        changes.shapes, changes.attributes, changes.configs, changes.inputs, changes.widths, changes.copied,
        changes.settings, changes.repeated,
    )  # fmt: skip
    for record in lists:
        for name in list(record):
            if name == path or name.startswith(f"{path}.") or not path:
                del record[name]
    changes.replaced = [name for name in changes.replaced if name != path]


class Record(TypedDict):
    """All that it takes to make a new model of the same class and config like a changed one."""

    changes: JsonObject
    original_heads: dict[str, list[int]]


def record_of(model: nn.Module) -> Record | None:
    """The record of a changed model; None for any other."""
    if not hasattr(model, ATTRIBUTE):
        return None
    original_heads = getattr(model, "original_heads", None) or {}
    return {"changes": changes_of(model).as_json(), "original_heads": dict(original_heads)}


def restructure(model: nn.Module, record: Record, shapes: Mapping[str, Sequence[int]]) -> nn.Module:
    """A new, unchanged model in the structure of a record, whose weights are to be filled in.

    shapes: of the weights that will be; a record with others is refused, before anything is made.
    """
    check_fields(record["changes"], get_type_hints(Changes), "changes")
    changes = Changes(**record["changes"])
    for name, shape in changes.shapes.items():
        if list(shapes.get(name, ())) != list(shape):
            raise ValueError(f"changes: {name!r:.60} is {shape}, but its weights are {shapes.get(name)}")
    model = reshape(model, changes)
    setattr(model, "original_heads", record["original_heads"])  # noqa: B010
    return model


def settle(model: nn.Module, changes: Changes) -> None:
    """Set the numbers of heads, let inputs be picked, and keep the record in the model."""
    for path, values in changes.attributes.items():
        for name, value in values.items():
            set_value(model.get_submodule(path), name.split("."), value)
    for path, values in changes.configs.items():
        copy_config(model.get_submodule(path), values)
    for path, picked in changes.inputs.items():
        module = model.get_submodule(path)
        for options in picked:
            Pick(**options).attach(module)
    for path, width in changes.widths.items():
        Width(**width).attach(model.get_submodule(path))
    for path, repeated in changes.repeated.items():
        Repeat(**repeated).attach(model.get_submodule(path))
    for name in changes.shapes:
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._non_persistent_buffers_set.discard(key)  # nothing else can make it again
    setattr(model, ATTRIBUTE, changes)
