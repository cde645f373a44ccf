"""A small twin of a large model: the same class, layers and heads, with narrow heads; and the way from what
was learned on it to the large model.

Which rows and columns belong to a head does not depend on how wide a head is. So they are found on the twin,
by the means of `cut`, and every index, shape and number is then brought to the width of the large model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from manyheads.common.preserved_state import seed_generators
from manyheads.models.changes import Changes, get_tensor
from manyheads.models.transformers_config import parts_of
from manyheads.surgery.weight_slices import Slice

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Names in configs. What is inside of the feed-forward networks says nothing about heads.
_HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "attention_head_size")
_INNER = re.compile(r"intermediate|ffn|d_ff$|n_inner|mlp")
_WIDTHS = re.compile(
    r"hidden_(size|dim)|d_model|n_embd|embed|^dim$|head_dim|d_kv|kv_channels|head_size|rotary_dim|proj|"
    r"query_pre_attn_scalar|inner_dim|width"
)
_NO_WIDTHS = re.compile(r"layer|num_|n_head|position|token|vocab|drop|labels|std|factor")
_HEAD_WIDTHS_TRIED = (4, 6, 8, 16, 32)
_VOCABULARY = 1009
_MOST = 2**26  # numbers in a twin


@dataclass(frozen=True)
class Scale:
    """How wide the heads of a twin are, and those of the large model.

    >>> Scale(4, 64).of(12), Scale(4, 64).blocks([4, 5, 6, 7], 8)
    (192, [(64, 128)])
    """

    small: int
    large: int

    def of(self, size: int) -> int:
        """A width of the twin in the large model."""
        if size * self.large % self.small:
            raise ValueError(
                f"a width of {size} in the small twin is not a multiple of its heads' {self.small}"
            )
        return size * self.large // self.small

    def blocks(self, indices: list[int], size: int) -> list[tuple[int, int]]:
        """The ranges of the large model that these indices out of ``size`` stand for: heads are whole."""
        width, blocks = self.small, []
        if size % width or len(indices) % width:
            raise ValueError(f"{len(indices)} of {size} rows are not whole heads of width {width}")
        for n in range(0, len(indices), width):
            first = indices[n]
            if first % width or indices[n : n + width] != list(range(first, first + width)):
                raise ValueError("the rows of a head do not lie side by side")
            blocks.append((self.of(first), self.of(first + width)))
        return blocks

    def slice(self, name: str, taken: Slice, size: int) -> Slice:
        """What becomes of a tensor of the large model with ``size`` entries along the axis."""
        if size == taken.size:  # an entry for each head
            return taken
        if size != self.of(taken.size):
            raise ValueError(f"{name} has {size} rows for {taken.size} of the small twin")
        blocks = self.blocks(taken.indices, taken.size)
        indices = [index for start, stop in blocks for index in range(start, stop)]
        return replace(taken, indices=indices, size=size)

    def value(self, what: str, before: object, large: object, after: object) -> object:
        """What a number of the large model becomes, by what it was in the twin and became there."""
        if before == large or self.small == self.large:
            return after
        if (
            isinstance(before, list | tuple)
            and isinstance(after, list | tuple)
            and isinstance(large, list | tuple)
        ):
            return [self.value(what, *each) for each in zip(before, large, after, strict=True)]
        whole = all(type(x) is int for x in (before, large, after))
        if not whole or not before or large * after % before:  # type: ignore[operator]
            raise ValueError(f"{what} is {large!r}, and {before!r} became {after!r} in the small twin")
        return large * after // before  # type: ignore[operator]


def head_width(config: PretrainedConfig) -> int:
    """The width of a head by a config, the same in all of its parts."""
    widths = set()
    for part in parts_of(config):
        heads = getattr(part, "num_attention_heads", None)
        explicit = [getattr(part, name, None) for name in _HEAD_WIDTHS]
        width = next((value for value in explicit if type(value) is int), None)
        hidden = getattr(part, "hidden_size", None)
        if width is None and type(heads) is int and heads and type(hidden) is int:
            width = hidden // heads
        if width is not None:
            widths.add(width)
    if len(widths) != 1:
        raise ValueError(f"its config gives {sorted(widths) or 'no'} widths of heads; expected one")
    return int(widths.pop())


def small_config(config: PretrainedConfig, scale: Scale) -> PretrainedConfig:
    """The config with heads of another width, narrow feed-forward networks and few words."""
    small = copy.deepcopy(config)
    for part in parts_of(small):
        for name, value in list(vars(part).items()):
            if type(value) is not int or isinstance(value, bool):
                continue
            if name == "vocab_size":
                setattr(part, name, min(value, _VOCABULARY))
            elif re.search(r"_token_id$|_idx$", name):
                setattr(part, name, min(value, _VOCABULARY - 1))
            elif _INNER.search(name):
                setattr(part, name, min(value, 4 * scale.small))
            elif (
                _WIDTHS.search(name)
                and not _NO_WIDTHS.search(name)
                and value * scale.small % scale.large == 0
            ):
                setattr(part, name, value * scale.small // scale.large)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(getattr(part, name, None), list):
                setattr(part, name, [min(number, _VOCABULARY - 1) for number in getattr(part, name)])
    return small


def twins(cls: type[PreTrainedModel], config: PretrainedConfig) -> Iterator[tuple[PreTrainedModel, Scale]]:
    """Small models with the layers and heads of a large one, the smallest first; their weights are random."""
    large = head_width(config)
    # A width that is also a number of heads would say nothing about what an axis is.
    counts = {value for part in parts_of(config) for value in vars(part).values() if type(value) is int}
    for small in (*(n for n in _HEAD_WIDTHS_TRIED if n < large and n not in counts), large):
        scale = Scale(small, large)
        with torch.random.fork_rng(devices=[]):
            seed_generators(0)
            try:
                with without_weights():
                    numbers = sum(p.numel() for p in _built(cls, small_config(config, scale)).parameters())
                if numbers > _MOST:
                    continue
                twin = _built(cls, small_config(config, scale))
            except Exception:  # a class that does not take this width
                continue
            with torch.no_grad():  # else biases are zero, and heads that add nothing look like none
                for parameter in twin.parameters():
                    if parameter.is_floating_point():
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
        yield twin.eval(), scale


def _built(cls: Any, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = cls._from_config(config, dtype=dtype)
    return model


@contextmanager
def without_weights() -> Iterator[None]:
    """Models made inside have parameters without memory (on the meta device); their buffers are as always."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def structure(cls: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this config without the memory of its weights."""
    with torch.random.fork_rng(devices=[]), without_weights():
        model = _built(cls, copy.deepcopy(config), dtype)
    model.eval()
    return model


def source_name(model: nn.Module, changes: Changes, name: str) -> str:
    """The tensor of the uncut model that a tensor of the cut one is made from."""
    try:
        get_tensor(model, name)
    except AttributeError:  # a table that a module has for itself now
        for path, source in changes.copied.items():
            if name.startswith(f"{path}."):
                return source + name.removeprefix(path)
    return name


def enlarged(
    changes: Changes, sliced: dict[str, Slice], twin: nn.Module, large: nn.Module, scale: Scale
) -> tuple[Changes, dict[str, Slice]]:
    """The changes of a cut twin as those of the large model, and what becomes of its tensors."""
    if changes.replaced or changes.repeated:
        raise ValueError("it has modules that are replaced when they are cut")
    new = copy.deepcopy(changes)
    slices = {}
    for name, taken in sliced.items():
        shape = list(get_tensor(large, source_name(large, changes, name)).shape)
        slices[name] = scale.slice(name, taken, shape[taken.axis])
        shape[taken.axis] = len(slices[name].indices)
        new.shapes[name] = shape
    if new.shapes.keys() != slices.keys():
        raise ValueError("it has tensors whose heads were changed otherwise than by leaving rows out")
    for path, values in changes.attributes.items():
        for name, value in values.items():
            before, now = (_value(model.get_submodule(path), name) for model in (twin, large))
            new.attributes[path][name] = scale.value(f"{path}.{name}", before, now, value)
    for path, values in changes.configs.items():
        for name, value in values.items():
            before, now = (getattr(model.get_submodule(path).config, name) for model in (twin, large))
            new.configs[path][name] = scale.value(f"{path}.config.{name}", before, now, value)
    for width in new.widths.values():
        width["before"], width["after"] = scale.of(width["before"]), scale.of(width["after"])
    for options in new.emptied.values():
        options["width"] = scale.of(options["width"])
    for count in new.counts.values():
        if count["d_key"] is not None:
            count["d_key"] = scale.of(count["d_key"])
    return new, slices


def _value(owner: object, path: str) -> object:
    """A number inside an attribute, as `set_value` sets it."""
    for name in path.split("."):
        if isinstance(owner, dict):
            owner = owner[name]
        else:
            owner = owner[int(name)] if isinstance(owner, list | tuple) else getattr(owner, name)
    return owner
