"""HeadwiseCache: a key/value cache in which every head keeps only what it needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from manyheads.nn.stack import DecoderCache
from manyheads.nn.transformers import Decoder
from manyheads.surgery.cache_layers import HeadwiseLayer, decoder_attentions, full_layers, kv_heads_by_layer
from manyheads.surgery.cache_plan import CachePlan


class HeadwiseCache(Cache, DecoderCache):
    """A cache in which each key/value head keeps everything, or the first few and the last tokens.

    Forgotten tokens take no memory. Pass it as ``past_key_values`` to a causal transformers model or its
    `generate` (greedy, sampling, beams, padded batches, prefill in chunks), or as ``cache`` to a `Decoder` or
    `mh.generate`. Outputs are those of the same model under a mask that hides the forgotten keys from these
    heads; without forgetting heads, those of a full cache. Layers with a sliding window or a state stay as
    they are.

    Parameters
    ----------
    model: the model that will use it: causal, of transformers with ``attn_implementation="sdpa"`` (their
        default), or a `Decoder`. Checked once, on a small probe.
    plan: which heads forget, for this model.

    Raises
    ------
    ValueError or TypeError, for a plan of another model, a model without such a cache, and later when another
    model uses it.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 12, "intermediate_size": 7, "num_attention_heads": 3, "vocab_size": 101}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    >>> plan = CachePlan.of(model, {0: [1, 2], 1: [0]}, first=2, window=16)
    >>> cache = HeadwiseCache(model, plan)
    >>> ids = torch.randint(101, (1, 200))
    >>> with torch.no_grad():
    ...     model(ids, past_key_values=cache).logits.shape
    torch.Size([1, 200, 101])
    >>> cache.get_seq_length(), [group.held for group in cache.layers[0].memory.groups]
    (200, [200, 18])

    See Also
    --------
    cache_plan: finds the heads that may forget.
    KVCache: a full cache of one attention module.

    References
    ----------
    Xiao et al. 2024, Efficient streaming language models with attention sinks.
    Xiao et al. 2024, DuoAttention: efficient long-context LLM inference with retrieval and streaming heads.
    """

    def __init__(self, model: nn.Module, plan: CachePlan) -> None:
        if not isinstance(plan, CachePlan):
            raise TypeError(f"plan: expected a CachePlan, got {type(plan).__name__}; mh.cache_plan makes one")
        sizes = kv_heads_by_layer(model)
        plan.check(model)
        if sizes != plan.sizes:
            raise ValueError(
                f"plan: it is for key/value heads {plan.sizes} by layer, but the model has {sizes}; make a "
                "plan for this model with mh.cache_plan"
            )
        layers: list[Any]
        if isinstance(model, Decoder):
            owners: list[nn.Module] = decoder_attentions(model)
            layers = [HeadwiseLayer(plan.windows(i), plan.first, owner) for i, owner in enumerate(owners)]
        else:
            layers = [
                HeadwiseLayer(plan.windows(i), plan.first, model) if i in sizes else layer
                for i, layer in enumerate(full_layers(model)[0])
            ]
        Cache.__init__(self, layers=layers)
        DecoderCache.__init__(self, layers, [], None, None)
        self.plan = plan

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = Cache.__repr__

    @property
    def bytes(self) -> int:
        """The memory that the keys and values of these heads take now."""
        return sum(layer.memory.bytes for layer in self.layers if isinstance(layer, HeadwiseLayer))

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; rows may repeat."""
        DecoderCache.reorder(self, rows)
