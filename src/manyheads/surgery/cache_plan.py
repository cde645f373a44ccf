"""Which key/value heads of a model may forget: the plan, on disk and in hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import NotRequired, TypedDict

from torch import nn

from manyheads.capture.site import Selection
from manyheads.common.json_files import read_json
from manyheads.common.whole_files import write_whole
from manyheads.heads.fingerprint import check_plan_model, fingerprint
from manyheads.surgery.cache_layers import kv_heads_by_layer

_FORMAT = "manyheads cache plan"
_VERSION = 1
_MOST = 1_000_000  # heads, or tokens of a window


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The key/value heads that keep only the first and the last tokens, ``{layer: [head numbers]}``.

    Layers are those of the model's cache, heads are key/value heads. Every other head keeps everything.

    See Also
    --------
    cache_plan: makes one from text.
    HeadwiseCache: follows one.

    References
    ----------
    Xiao et al. 2024, DuoAttention: efficient long-context LLM inference with retrieval and streaming heads.

    Examples
    --------
    >>> plan = CachePlan({0: [1], 1: [0, 1]}, {0: 2, 1: 2}, first=4, window=60, model="5e1a")
    >>> plan.budget, plan.share(640)
    (0.25, 0.325)
    """

    forget: dict[int, list[int]]
    sizes: dict[int, int]  # how many key/value heads each layer has
    first: int
    window: int
    model: str  # fingerprint
    prices: dict[int, list[float]] = field(default_factory=dict)  # what forgetting was predicted to cost
    protected: dict[int, list[int]] = field(default_factory=dict)  # heads that must not forget

    @staticmethod
    def of(
        model: nn.Module, forget: Mapping[int, Iterable[int]], *, first: int = 4, window: int = 256
    ) -> CachePlan:
        """Your own plan for a model: these heads forget.

        >>> from manyheads.nn.transformers import Decoder
        >>> CachePlan.of(Decoder(12, heads=3, layers=2, vocabulary=101), {1: [0, 2]}, window=5)
        CachePlan(2 of 6 key/value heads keep 4 first and 5 last tokens: {1: [0, 2]})
        """
        check_kept(first, window)
        sizes = kv_heads_by_layer(model)
        heads: dict[int, list[int]] = {}
        for layer, numbers in Selection(forget).heads.items():
            if not isinstance(layer, int) or layer not in sizes:
                raise ValueError(
                    f"forget: the cache has no layer {layer!r} whose heads may forget; expected one of "
                    f"{', '.join(map(str, sizes))}"
                )
            heads[layer] = sorted(set(numbers))
            wrong = [head for head in heads[layer] if head not in range(sizes[layer])]
            if wrong:
                raise ValueError(
                    f"forget: layer {layer} has no key/value head {wrong[0]!r}; expected 0 to "
                    f"{sizes[layer] - 1}"
                )
        return CachePlan(heads, sizes, first, window, fingerprint(model))

    def __repr__(self) -> str:
        return (
            f"CachePlan({self.forgetting} of {sum(self.sizes.values())} key/value heads keep {self.first} "
            f"first and {self.window} last tokens: {self.forget})"
        )

    @property
    def forgetting(self) -> int:
        """How many heads forget."""
        return sum(map(len, self.forget.values()))

    @property
    def budget(self) -> float:
        """The share of key/value heads that keep everything."""
        return 1 - self.forgetting / sum(self.sizes.values())

    def share(self, length: int) -> float:
        """The share of a full cache's bytes that is held after ``length`` tokens.

        >>> CachePlan({0: [0]}, {0: 2}, first=4, window=60, model="5e1a").share(0)
        Traceback (most recent call last):
        ValueError: length: expected a number of tokens, at least 1, got 0
        """
        if not length >= 1:
            raise ValueError(f"length: expected a number of tokens, at least 1, got {length!r}")
        of_forgetting = min(1.0, (self.first + self.window) / length)
        return self.budget + (1 - self.budget) * of_forgetting

    def windows(self, layer: int) -> list[int | None]:
        """For each head of a layer how many of the last tokens it keeps; None for all."""
        chosen = self.forget.get(layer, [])
        return [self.window if head in chosen else None for head in range(self.sizes[layer])]

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError unless the plan was made for this model with these weights."""
        check_plan_model(self.model, model, "make a plan for this model with mh.cache_plan")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, atomically."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "first": self.first,
            "window": self.window,
            "sizes": self.sizes,
            "forget": self.forget,
            "prices": self.prices,
            "protected": self.protected,
        }
        write_whole(path, json.dumps(document, indent=1))

    @staticmethod
    def load(path: str | PathLike[str]) -> CachePlan:
        """Read what `save` wrote. Raises a ValueError that names the file if it is not a plan."""
        document = read_json(path, _Document, "plan", format=_FORMAT, version=_VERSION)
        try:
            sizes = {int(layer): size for layer, size in document["sizes"].items()}
            forget, protected = (
                {int(layer): heads for layer, heads in named.items()}
                for named in (document["forget"], document.get("protected", {}))
            )
            prices = {int(layer): values for layer, values in document.get("prices", {}).items()}
            check_kept(document["first"], document["window"])
        except ValueError as error:
            raise ValueError(f"plan: {path} is damaged ({error})") from None
        if not sizes or not all(0 < size <= _MOST for size in sizes.values()):
            raise ValueError(f"plan: {path} is damaged: its numbers of heads are not valid")
        for named in (forget, protected):
            for layer, heads in named.items():
                if not set(heads) <= set(range(sizes.get(layer, 0))) or len(set(heads)) < len(heads):
                    raise ValueError(f"plan: {path} is damaged: layer {layer} has no such heads")
        if prices and {layer: len(values) for layer, values in prices.items()} != sizes:
            raise ValueError(f"plan: {path} is damaged: its prices are not those of its heads")
        first, window = document["first"], document["window"]
        return CachePlan(forget, sizes, first, window, document["model"], prices, protected)


class _Document(TypedDict):
    model: str
    first: int
    window: int
    sizes: dict[str, int]
    forget: dict[str, list[int]]
    prices: NotRequired[dict[str, list[float]]]
    protected: NotRequired[dict[str, list[int]]]


def check_kept(first: int, window: int) -> None:
    """Raise unless these are numbers of tokens that a head can keep.

    >>> check_kept(4, 0)
    Traceback (most recent call last):
    ValueError: window: expected a whole number of last tokens from 1 to 1000000, got 0
    """
    for name, value, least in (("first", first, 0), ("window", window, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            which = "first" if name == "first" else "last"
            raise ValueError(
                f"{name}: expected a whole number of {which} tokens from {least} to {_MOST}, got {value!r}"
            )
