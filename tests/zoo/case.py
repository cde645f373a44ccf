"""What the zoo knows of a model: how to run it, and the truth about its attention, by plain code.

A `Case` is a model with inputs, and a function that computes the model's output and its attention weights
again, in float64, by code that shares nothing with the model's forward but its parameters. The same function
takes heads to silence: what attention gives for these heads is zero there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.preserved_state import seed_generators

Silent = Mapping[int, frozenset[int]]  # which heads of which attention of the case give nothing


@dataclass(eq=False)
class View:
    """One way to lay out the weights: (batch, heads, queries, keys).

    own: (queries,) the key at which each query stands; None when it stands at none.
    first: whether the first key means something (it does not in a block of a sequence).
    tokens: where the keys that are tokens begin and end, if learned keys beside them have no position;
        ``own`` counts from there.
    """

    weights: Tensor
    own: Tensor | None
    counted: Tensor  # (batch, queries)
    first: bool = True
    tokens: tuple[int, int] | None = None


@dataclass(eq=False)
class Truth:
    """One attention of a model.

    path: of the module it happens in.
    weights: (batch, heads, queries, keys) in float64: what multiplies the values.
    kinds: the kinds that are right ("self", "causal", "cross").
    own: (queries,) the key at which each query stands; None for cross-attention.
    counted: (batch, queries) the queries that are no padding.
    outputs: (batch, heads, queries, width) weights times values, where there is one such tensor.
    views: other ways to lay out the same weights (blocks of a sequence, keys without sinks).
    vague: positions may be left out, since they have no clear meaning here (memory keys, images, blocks).
    scattered: each head is a module of its own: several sites of fewer heads are right, too.
    ids: (batch, keys) the token ids of the keys, where the model takes ids.
    hidden: (queries, keys) or more axes, True where the mask hides a key; else what has a weight of zero.
    """

    path: str
    weights: Tensor
    kinds: tuple[str, ...] = ("self",)
    own: Tensor | None = None
    counted: Tensor | None = None
    outputs: Tensor | None = None
    views: list[View] = field(default_factory=list)
    vague: bool = False
    scattered: bool = False
    hidden: Tensor | None = None
    ids: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.weights.shape[1]

    def all_views(self) -> list[View]:
        batch, _, queries, _ = self.weights.shape
        counted = self.counted
        if counted is None:
            counted = torch.ones(batch, queries, dtype=torch.bool)
        return [View(self.weights, self.own, counted), *self.views]


Plain = Callable[[nn.Module, Any, Silent], tuple[Tensor, list[Truth]]]


@dataclass(eq=False)
class Case:
    """A model of the zoo.

    inputs: what it runs on (a tensor, or a tuple of positional arguments, or a dict of keyword ones).
    plain: (model in float64, inputs in float64, heads to silence) to the output and the truths.
    longer: other inputs of the same kind, longer, that a cut model must be right on, too.
    output: what to compare of a model's output, given its inputs.
    cut: which heads of which attention to cut; group by group where heads share keys.
    drive: runs the model on the inputs in several forwards; then there are no maps and nothing is cut.
    tokens: kinds of tokens by name, for the shares of attention on them.
    tolerance: of means of statistics.
    mixer: the path of a module that mixes tokens without attention and must be named; then no truths.
    """

    name: str
    theme: str
    model: nn.Module
    inputs: Any
    plain: Plain
    longer: Any = None
    cut: Mapping[int, frozenset[int]] = field(default_factory=lambda: {0: frozenset({1})})
    mixer: str | None = None
    output: Callable[[Any, Any], Tensor] = lambda out, inputs: out
    tolerance: float = 1e-3
    tokens: Mapping[str, list[int]] = field(default_factory=dict)
    drive: Callable[[nn.Module, Any], Tensor] | None = None

    def run(self, model: nn.Module, inputs: Any) -> Tensor:
        """The output of a model as one tensor, with the random numbers of the case."""
        seed_generators(7)
        with torch.no_grad():
            if self.drive is not None:
                out = self.drive(model, inputs)
            elif isinstance(inputs, dict):
                out = model(**inputs)
            elif isinstance(inputs, tuple | list):
                out = model(*inputs)
            else:
                out = model(inputs)
        return self.output(out, inputs)

    def expected(
        self, inputs: Any, silent: Silent | None = None, evaluating: bool = False
    ) -> tuple[Tensor, list[Truth]]:
        """Output and truths by plain code in float64; without dropout when ``evaluating``."""
        model = copy.deepcopy(self.model).double()
        seed_generators(7)
        with torch.no_grad():
            return self.plain(model.eval() if evaluating else model, doubled(inputs), silent or {})


def doubled(inputs: Any) -> Any:
    """Inputs with their floating tensors in float64."""
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {name: doubled(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(doubled(value) for value in inputs)
    return inputs
