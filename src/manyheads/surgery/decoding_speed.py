"""How fast a causal model generates, and how large its cache really is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from manyheads.common.devices import device_of
from manyheads.common.preserved_state import evaluating
from manyheads.models.text_config import positions_of
from manyheads.models.transformers_config import is_transformers
from manyheads.nn.transformers import Decoder

MEMORY = 1e9  # bytes of cache, at most
_TOKENS = 20_000  # that a model of ours reads at once, at most
_STEPS = 4
_MEASURED = 4  # tokens whose keys are weighed


@dataclass(frozen=True)
class Decoding:
    """Tokens that two models generate in a second, with this many sequences and tokens before.

    why_not: why it was not measured; then the speeds are 0.
    """

    batch: int
    length: int
    before: float = 0.0
    after: float = 0.0
    why_not: str = ""


class LayerCache(NamedTuple):
    """What one layer of a cache holds: its number of key heads, and bytes for each token; 0 bytes where the
    layer has a window, and holds no more of a longer text.
    """

    heads: int
    bytes: float


def cache_bytes(model: nn.Module) -> float | None:
    """The bytes that a model's cache holds for each token, measured; None for models without one.

    >>> cache_bytes(Decoder(12, heads=4, kv_heads=2, layers=2, vocabulary=17))
    96.0
    """
    layers = cache_by_layer(model)
    return None if layers is None else sum(layer.bytes for layer in layers)


def cache_by_layer(model: nn.Module) -> list[LayerCache] | None:
    """What each layer of a model's cache holds, measured; None for models without a cache."""
    with torch.no_grad(), evaluating(model):
        cache = _fill_cache(model, 1, _MEASURED)
    if cache is None:
        return None
    held = []
    for layer in getattr(cache, "layers", None) or cache.blocks:
        keys, values = _tensors(layer)
        size = sum(x.numel() * x.element_size() for x in (keys, values)) / _MEASURED
        held.append(LayerCache(keys.shape[1], 0.0 if getattr(layer, "is_sliding", False) else size))
    return held or None


def decoding_speed(
    model: nn.Module, small: nn.Module, sizes: Sequence[int] = (1, 32), lengths: Sequence[int] = (512, 8192)
) -> list[Decoding]:
    """Tokens per second of two models that generate, a step after a cache of each length; the models take
    turns, and the median of a few steps counts. What would need more than 1 GB of cache, or more positions
    than the model has, is not measured, and says so.

    >>> model = Decoder(12, heads=4, layers=2, vocabulary=17, max_length=20, positions="learned")
    >>> [speed.why_not for speed in decoding_speed(model, model, sizes=[1], lengths=[8, 512])]
    ['', 'it has 20 positions']
    """
    token_bytes = cache_bytes(model)
    if token_bytes is None:
        return []
    return [_measure_speed(model, small, size, length, token_bytes) for size in sizes for length in lengths]


def _measure_speed(
    model: nn.Module, small: nn.Module, batch: int, length: int, token_bytes: float
) -> Decoding:
    positions = _positions(model)
    if positions is not None and length + _STEPS > positions:
        return Decoding(batch, length, why_not=f"it has {positions:,} positions")
    if batch * length * token_bytes > MEMORY:
        return Decoding(batch, length, why_not=f"{batch * length * token_bytes / 1e9:.1f} GB of cache")
    if isinstance(model, Decoder) and batch * length > _TOKENS:
        return Decoding(batch, length, why_not=f"{batch * length:,} tokens to read first")
    with torch.no_grad(), evaluating(model, small):
        caches = [_fill_cache(network, batch, length) for network in (model, small)]
        times: tuple[list[float], list[float]] = [], []
        for step in range(_STEPS):
            for network, cache, seconds in zip((model, small), caches, times, strict=True):
                start = perf_counter()
                _step(network, cache, batch)
                if step:  # the first warms up
                    seconds.append(perf_counter() - start)
    before, after = (batch / median(seconds) for seconds in times)
    return Decoding(batch, length, before, after)


def _fill_cache(model: Any, batch: int, length: int) -> Any:
    """A cache with this many tokens: random keys where their content does not matter."""
    device = device_of(model)
    if isinstance(model, Decoder):
        if model.embedding is None or getattr(model.blocks[0], "cross_attention", None) is not None:
            return None
        cache = model.new_cache(length + _STEPS)
        model(torch.zeros(batch, length, dtype=torch.long, device=device), cache=cache, last=True)
        return cache
    if not is_transformers(model) or model.config.is_encoder_decoder or not model.can_generate():
        return None
    try:
        ids = torch.ones(batch, 2, dtype=torch.long, device=device)
        short = model(input_ids=ids, use_cache=True).past_key_values
        full: Any = DynamicCache(config=model.config) if type(short) is DynamicCache else type(short)()
        for number, layer in enumerate(short.layers):
            shape = layer.keys.shape[:2]
            full.update(
                *(torch.randn(*shape, length, x.shape[3], dtype=x.dtype, device=device)
                  for x in (layer.keys, layer.values)), number,
            )  # fmt: skip
        return full
    except Exception:  # it takes other inputs, or has another kind of cache
        return None


def _step(model: Any, cache: Any, batch: int) -> None:
    ids = torch.ones(batch, 1, dtype=torch.long, device=device_of(model))
    if isinstance(model, Decoder):
        model(ids, cache=cache, last=True)
    else:
        model(input_ids=ids, past_key_values=cache, use_cache=True)


def _positions(model: Any) -> int | None:
    """How many positions a model has; None for any number."""
    if isinstance(model, Decoder):
        return model.max_length
    return positions_of(model)


def _tensors(layer: Any) -> tuple[Tensor, Tensor]:
    """The keys and values of one layer of a cache, of transformers or of ours."""
    if hasattr(layer, "keys"):
        return layer.keys, layer.values
    held: tuple[Tensor, Tensor] = layer.held()
    return held
