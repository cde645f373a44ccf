"""Models of transformers, small and with random weights; the truth is what their eager branch returns.

A `Spec` names the class, the config, and for each stack of attention layers the field of the output that
holds its weights, the path of the modules, their output projection, and the kind. Heads are silenced by
setting the columns of the output projection that read them to zero.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bench.missing_packages import stand_in
from tests.zoo.case import Case, Silent, Truth
from torch import Tensor, nn

THEME = "transformers"


@dataclass(frozen=True)
class Stack:
    """Layers of attention: where the model returns their weights, and where they are."""

    weights: str  # field of the output
    path: str  # of each layer's attention module, {} for its number
    projection: str  # of the heads' outputs
    kind: str  # "self", "causal" or "cross", or several with / between where either is right
    vague: bool = False
    counts: bool = True  # whether the attention mask of the inputs is about the queries
    width: int = 0  # of a head in the projection; 0: its columns are all of the heads
    at: int = 0  # where the stack begins among the weights of the field
    scores: bool = False  # the field holds what goes into the softmax


@dataclass(frozen=True)
class Spec:
    name: str
    config: Mapping[str, Any]
    stacks: tuple[Stack, ...]
    inputs: Callable[..., dict[str, Tensor]]
    model: str = ""
    cut: frozenset[int] = frozenset({1})
    longer: bool = True
    missed: str = ""  # the path of what mixes tokens without attention; then there are no stacks
    sharp: float = 1.0
    label: str = ""  # told beside the name
    single: bool = False  # the truth is computed in float32
    after: Callable[[nn.Module], None] = field(default=lambda model: None)


def text(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(5, 99, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[-1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def left(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    """Padding in front, as generation has it."""
    ids = torch.randint(5, 99, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[-1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def unmasked(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(5, 99, (batch, length))}


def pair(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return text(batch, length, padded) | {"decoder_input_ids": torch.randint(5, 99, (batch, length - 4))}


def pixels(
    batch: int, length: int, padded: bool = True, size: int = 12, channels: int = 3
) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, channels, size, size)}


def waves(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 800)}


@contextmanager
def standing_in(package: str) -> Iterator[None]:
    """Inside, a package that is missing and that models only load for their data can be imported."""
    finders = list(sys.meta_path)
    stand_in(package)
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        if not any(
            getattr(finder, "find_spec", None) and finder.find_spec(package, None) for finder in finders
        ):
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]


def sharpen(model: nn.Module, sharp: float) -> None:
    """Weights that heads can be told apart by; what starts as zeros does not stay so."""
    with torch.no_grad():
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                if isinstance(module, nn.Embedding):
                    value.normal_()
                elif value.dim() > 1:
                    value.normal_(std=1.6 * sharp * value[0].numel() ** -0.5)
                elif name == "bias":
                    value.normal_(std=0.2)


def first(out: Any) -> Tensor:
    values = out.to_tuple() if hasattr(out, "to_tuple") else out if isinstance(out, tuple) else (out,)
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def shown(out: Any, inputs: Any) -> Tensor:
    """The first output, with zeros at padding, where implementations may differ."""
    states = first(out)
    mask = inputs.get("attention_mask")
    if mask is not None and "decoder_input_ids" not in inputs and states.shape[:2] == mask.shape:
        states = states.masked_fill(mask[..., None] == 0, 0.0)
    return states


def plain(spec: Spec, model: Any, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
    """What the eager branch returns, in float64 where it can."""
    model = _eager(model.float() if spec.single else model)
    places = []
    for stack in spec.stacks:
        layers = 0
        while _has(model, stack.path.format(layers)) and (layers == 0 or "{}" in stack.path):
            places.append((stack, layers))
            layers += 1
    heads = _heads(spec, model, inputs) if silent else {}
    for number, gone in silent.items():
        stack, layer = places[number]
        weight = _columns(model, stack.projection.format(layer))
        width = stack.width or weight.shape[1] // heads[stack.path]
        for head in gone:
            weight[:, head * width : (head + 1) * width] = 0.0
    out = _run(model, inputs)
    truths = []
    for stack, layer in places:
        weights = getattr(out, stack.weights)[stack.at + layer].double()
        weights = weights.softmax(-1) if stack.scores else weights
        queries, keys = weights.shape[2:]
        mask = inputs.get("attention_mask") if stack.counts else None
        counted = None if mask is None or mask.shape[1] != queries else mask.bool()
        own = None if stack.kind == "cross" or keys < queries else torch.arange(queries) + keys - queries
        kinds = tuple(stack.kind.split("/"))
        truths.append(Truth(stack.path.format(layer), weights, kinds, own, counted, vague=stack.vague))
    return shown(out, inputs).double(), truths


def _eager(model: Any) -> Any:
    """The same model in its eager implementation, which some choose when they are built."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    twin = type(model)(config).to(next(model.parameters()).dtype).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def _columns(model: nn.Module, path: str) -> Tensor:
    """The weights (outputs, inputs) of an output projection: a module, or a parameter with heads."""
    if not _has(model, path):
        value: Tensor = model.get_parameter(path).data
        return value.view(len(value), -1)
    module = model.get_submodule(path)
    weight: Tensor = module.weight.data  # type: ignore[assignment]
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _heads(spec: Spec, model: Any, inputs: Any) -> dict[str, int]:
    out = _run(model, inputs)
    return {stack.path: getattr(out, stack.weights)[stack.at].shape[1] for stack in spec.stacks}


def _run(model: Any, inputs: Any) -> Any:
    inputs = {
        name: value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    try:
        return model(**inputs, output_attentions=True)
    except RuntimeError:  # something in it is float32, whatever the weights are
        floats = {
            name: value.float() if value.is_floating_point() else value for name, value in inputs.items()
        }
        return model.float()(**floats, output_attentions=True)


def title(spec: Spec) -> str:
    return f"transformers: {spec.model or spec.name + 'Model'}{spec.label and f', {spec.label}'}"


def make(spec: Spec) -> Case:
    """The case of a spec."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, spec.name)))
        config = getattr(transformers, f"{spec.name}Config")(**spec.config)
        model = getattr(transformers, spec.model or f"{spec.name}Model")(config).eval()
        sharpen(model, spec.sharp)
        spec.after(model)
        inputs = spec.inputs(3, 11)
        longer = spec.inputs(2, 61, False) if spec.longer else None
    name = title(spec)
    if spec.missed:
        return Case(
            name,
            THEME,
            model,
            inputs,
            lambda m, x, s: (shown(m(**x), x), []),
            mixer=spec.missed,
            output=shown,
        )
    return Case(name, THEME, model, inputs, partial(plain, spec), longer, {0: spec.cut}, output=shown)
