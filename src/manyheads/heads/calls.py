"""One attention call, whatever way the model made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from manyheads.heads.sites import Site
from manyheads.nn.mask import Mask


@dataclass(eq=False)
class Call:
    """One attention call of a running model.

    Attributes
    ----------
    site: where it happened.
    query: (batch, heads, queries, d_key), or None when a hand-written softmax hid it.
    key: (batch, kv_heads, keys, d_key), or None likewise.
    value: (batch, kv_heads, keys, d_value); key and value as the model passed them, so perhaps already
        repeated.
    output: (batch, heads, queries, d_value).
    mask: who may attend to whom, aligned at the last query and key.
    scale: of the scores.
    scores: (batch, heads, queries, keys + sinks), only from a model that wrote its own softmax: what went
        into it.
    weights: (batch, heads, queries, keys) that multiplied the values, likewise; None when some were dropped.
    sinks: how many columns of `scores` before and after the keys are no keys, but learned sinks.
    tokens: (batch, keys) ids of the keys' tokens, where they could be followed.
    again: the weights are those of the call before, now on further values.
    blocked: the batch holds pieces of one sequence (blocks, windows).
    partial: value and output are those of some keys only; the model adds the others' to it.
    own: the column of `scores` at which the queries' own keys begin, where several sets of keys stand side
        by side; -1 otherwise.
    modified: the model changed its weights after the softmax; `scores` are then the logarithm of the weights
        that multiply the values.
    signed: some of those weights are negative, so that they have no logarithm and no entropy.
    """

    site: Site
    query: Tensor | None
    key: Tensor | None
    value: Tensor
    output: Tensor
    mask: Mask
    scale: float | None = None
    dropout: float = 0.0
    scores: Tensor | None = None
    weights: Tensor | None = None
    sinks: tuple[int, int] = (0, 0)
    tokens: Tensor | None = None
    again: bool = False
    blocked: bool = False
    partial: bool = False
    own: int = -1
    modified: bool = False
    signed: bool = False

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.scores.shape[3] if self.partial and self.scores is not None else self.value.shape[2]

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.output.shape[2]


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
SDPA = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}


@dataclass(eq=False)
class Fused:
    """The arguments of a call to a fused kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    scale: float | None = None
    dropout: float = 0.0


def from_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fused:
    """Read the arguments of torch's scaled_dot_product_attention, whose causal mask is aligned at the first
    key.
    """
    given = dict(zip(_SDPA, args, strict=False)) | kwargs
    mask, top_left = given.get("attn_mask"), bool(given.get("is_causal"))
    conditions = Mask()
    if isinstance(mask, CausalBias):  # an object that stands for a mask: its own memory holds nothing
        top_left = mask.variant is CausalVariant.UPPER_LEFT
        conditions = Mask(causal=not top_left)
    elif mask is not None:
        conditions = Mask(tensors=(mask,))
    if top_left:
        queries, keys = given["query"].shape[-2], given["key"].shape[-2]
        if queries == keys:
            conditions = conditions & Mask(causal=True)
        else:
            allowed = torch.ones(queries, keys, dtype=torch.bool, device=given["query"].device).tril()
            conditions = conditions & allowed
    return Fused(
        given["query"],
        given["key"],
        given["value"],
        conditions,
        given.get("scale"),
        given.get("dropout_p", 0.0),
    )


def flex_scores(args: tuple[Any, ...]) -> Tensor:
    """The scores (batch, heads, queries, keys) that FlexAttention takes the softmax of, as its eager form
    makes them.
    """
    from torch._higher_order_ops.flex_attention import _math_attention_inner

    query, key, value = args[:3]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).expand(query.shape[0], -1, -1, -1)
    return _math_attention_inner(query, key, value, *args[3:])[1]
