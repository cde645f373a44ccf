"""The layers of a model's cache: how many key/value heads each has, and which of them may forget."""

from __future__ import annotations

import inspect
import sys
import weakref
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from manyheads.common.compare_outputs import TOLERANCE
from manyheads.common.devices import device_of
from manyheads.common.errors import describe_error
from manyheads.common.preserved_state import evaluating
from manyheads.nn.head_memory import HeadMemory
from manyheads.nn.mask import Mask
from manyheads.nn.stand_in import StandIn, stand_ins
from manyheads.nn.transformers import Decoder

_PROBE = 7  # tokens
_TOLERANCE_BESIDE_MODEL = 10  # a whole model multiplies what one product rounds


class HeadwiseLayer(CacheLayerMixin):
    """One layer of a cache whose heads hold different numbers of keys: for transformers and for our own.

    `update` returns stand-ins; the keys are added, and attended to, when the attention function gets them.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False
    fixed = False  # of `KVCache`: it takes further keys
    inference_only = True

    def __init__(self, windows: list[int | None], first: int, owner: nn.Module | None) -> None:
        super().__init__()
        self.memory = HeadMemory(windows, first)
        self._new: tuple[Tensor, Tensor] | None = None
        self._owner = None if owner is None else weakref.ref(owner)
        self._modules = frozenset(() if owner is None else map(id, owner.modules()))

    def __repr__(self) -> str:
        windows = ["all" if window is None else window for window in self.memory.windows]
        return f"HeadwiseLayer(windows={windows}, length={self.length})"

    @property
    def length(self) -> int:
        """How many tokens have been read, those that were forgotten included."""
        return self.memory.length + (0 if self._new is None else self._new[0].shape[2])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is taken when the first keys come."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[StandIn, StandIn]:
        """Take new keys and values (batch, kv_heads, new, width); what stands for all of them."""
        self._check(key_states, value_states)
        self._new = key_states, value_states
        self.is_initialized = True
        return stand_ins(self, key_states, value_states, self.length)

    append = update  # as `KVCache` calls it

    def attend(self, q: Tensor, mask: Mask, scale: float | None, dropout: float) -> Tensor:
        """Add the new keys, and attend to all that are kept: see `HeadMemory.attend`."""
        return self.memory.attend(q, *self.take_new(), mask, scale, dropout)

    def take_new(self) -> tuple[Tensor, Tensor]:
        """The new keys and values, once."""
        if self._new is None:
            raise ValueError(
                "cache: the model reads the same keys twice; expected one attention call for each layer"
            )
        new, self._new = self._new, None
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are about all tokens, those that were forgotten included."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens have been read."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def belongs_to(self, module: nn.Module) -> None:
        """Raise when a module of another model uses it."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and id(module) not in self._modules:
            raise ValueError(
                f"cache: it was made for one {type(owner).__name__} and is used by a module of another model "
                f"({type(module).__name__}); make one HeadwiseCache for each model"
            )

    def reorder(self, rows: Tensor) -> None:
        """Let batch row n continue what row ``rows[n]`` held."""
        self.memory.reorder(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`reorder`, as transformers calls it."""
        self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """`reorder`, as transformers calls it."""
        self.memory.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch several times, as transformers calls it."""
        if self.memory.start is not None:
            rows = torch.arange(len(self.memory.start), device=self.memory.start.device)
            self.memory.reorder(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was forgotten cannot come back."""
        if tokens_to_remove:
            raise ValueError(
                "cache: a cache whose heads forget cannot be cropped, as assisted generation asks; use a "
                "full cache there"
            )

    def reset(self) -> None:
        """Forget everything."""
        self.memory, self._new = HeadMemory(self.memory.windows, self.memory.first), None
        self.is_initialized = False

    def _check(self, k: Tensor, v: Tensor) -> None:
        caller = _calling_module()
        if caller is not None:
            self.belongs_to(caller)
        if self._new is not None:
            raise ValueError(
                "cache: new keys came before the last ones were attended to by scaled_dot_product_attention; "
                "load the model with attn_implementation='sdpa', or use a full cache"
            )
        heads = len(self.memory.windows)
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[1] != heads:
            raise ValueError(
                f"cache: expected keys and values (batch, {heads}, new, width), got {tuple(k.shape)} and "
                f"{tuple(v.shape)}"
            )
        if self.inference_only and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("cache: it changes in place and has no gradient; use it under torch.no_grad()")


def full_layers(model: nn.Module) -> tuple[list[Any], list[int]]:
    """The layers of a transformers model's own cache, and the numbers of those that keep everything.

    Raises a ValueError, or TypeError, that says why there are none.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a causal transformers model or a Decoder of manyheads, got "
            f"{type(model).__name__}, a class without a cache that we can replace"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: {type(model).__name__} reads its source by cross-attention, whose cache does not grow; "
            "expected a model with a decoder only"
        )
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model: {type(model).__name__} takes no past_key_values: a class without a cache; expected a "
            "causal language model"
        )
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception as error:  # whatever it is, transformers cannot make its cache
        raise ValueError(
            f"model: transformers makes no cache for {type(model).__name__} ({describe_error(error)})"
        ) from error
    numbers = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not numbers:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no layer"
        raise ValueError(
            f"model: no layer of {type(model).__name__} keeps all keys and values ({kinds}), so there is "
            "nothing to forget: windows and states are already small"
        )
    return layers, numbers


def kv_heads_by_layer(model: nn.Module) -> dict[int, int]:
    """How many key/value heads each layer has that keeps everything, by its number in the cache.

    >>> kv_heads_by_layer(Decoder(12, heads=6, kv_heads=2, layers=2, vocabulary=101))
    {0: 2, 1: 2}
    """
    if isinstance(model, Decoder):
        return {i: attention.kv_heads for i, attention in enumerate(decoder_attentions(model))}
    if model in _PROVED:
        return _PROVED[model]
    layers, numbers = full_layers(model)
    probe = _probe(model)
    heads: dict[int, int] = {}
    with torch.no_grad(), evaluating(model):
        cache: Any = DynamicCache(config=cast(PreTrainedModel, model).config)
        try:
            expected = _logits(model(**probe, past_key_values=cache, use_cache=True))
        except Exception as error:  # whatever it is, the model does not run with a cache
            raise ValueError(
                f"model: {type(model).__name__} cannot read {_PROBE} tokens with a cache "
                f"({describe_error(error)}); expected a causal language model"
            ) from error
        for number in numbers:
            keys = cache.layers[number].keys
            if keys is None or keys.dim() != 4 or keys.shape[2] != _PROBE:
                what = "no keys" if keys is None else f"keys {tuple(keys.shape)}"
                raise ValueError(
                    f"model: layer {number} of {type(model).__name__} put {what} into the cache; expected "
                    f"(batch, kv_heads, {_PROBE}, width)"
                )
            heads[number] = keys.shape[1]
        _prove(model, layers, heads, probe, expected)
    _PROVED[model] = heads
    return heads


def _prove(
    model: nn.Module, layers: list[Any], heads: dict[int, int], probe: dict[str, Tensor], expected: Tensor
) -> None:
    """Raise unless the model computes the same with our cache, in two chunks, when no head forgets."""
    ours = [
        HeadwiseLayer([_PROBE] * heads[number], 1, model) if number in heads else layer
        for number, layer in enumerate(layers)
    ]
    cache, ids = Cache(layers=ours), probe["input_ids"]
    parts = [
        _logits(model(input_ids=part, past_key_values=cache, use_cache=True))
        for part in (ids[:, :4], ids[:, 4:6], ids[:, 6:])
    ]
    got = torch.cat(parts, 1)
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
    tolerance = TOLERANCE.get(expected.dtype, 1e-5) * _TOLERANCE_BESIDE_MODEL
    if got.shape != expected.shape or not error <= tolerance:
        raise ValueError(
            f"model: {type(model).__name__} gives other outputs with a headwise cache (difference "
            f"{float(error):.1e} on a probe where no head forgets); it cannot be used with this model"
        )


_PROVED: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()


def _probe(model: nn.Module) -> dict[str, Tensor]:
    table = cast(PreTrainedModel, model).get_input_embeddings()
    size = int(getattr(table, "num_embeddings", 0) or 100)
    ids = (torch.arange(2 * _PROBE, device=device_of(model)) * 31 + 3) % size
    return {"input_ids": ids.view(2, _PROBE)}


def _logits(result: Any) -> Tensor:
    logits = result[0]
    assert isinstance(logits, Tensor)
    return logits


def decoder_attentions(decoder: Decoder) -> list[Any]:
    """The attention module of each block; raises where their heads cannot forget."""
    blocks: Any = decoder.blocks
    if any(block.cross_attention is not None for block in blocks):
        raise ValueError(
            "model: this Decoder reads a context by cross-attention, whose cache does not grow; expected a "
            "decoder without cross=True"
        )
    attentions = [block.attention for block in blocks]
    if any(one.window is not None or one.chunk is not None for one in attentions):
        raise ValueError(
            "model: its attention has a window or chunks, so its keys are already few; expected a decoder "
            "that attends to everything"
        )
    return attentions


def _calling_module() -> nn.Module | None:
    """The module whose forward is running: the one that hands over keys."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module
        frame = frame.f_back
    return None
