"""One attention call, whatever way the model made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from manyheads.capture.axes import Roles
from manyheads.capture.site import Site
from manyheads.common.types import Arguments, Keywords
from manyheads.nn.mask import Mask


@dataclass(eq=False)
class CallOrigin:
    """How a call was made: what `proof` needs to know to say which of its axes are heads.

    key: the module that was running, the kind of function (``fused``, ``product`` or ``softmax``) and the
        number
        of axes: what is proved of one call of this key holds for all.
    tensor: the queries, or the scores where no queries were seen, with all their axes.
    roles: what custom says of those axes.
    axes: for each of them the axis of the function's result that it became, -1 for none.
    result: what custom says of the axes of that result.
    heads: the number of heads in a merged axis.
    frame: the module that made the call, told apart from its other runs.
    number: which product of weights and values of that run it was; -1 for a fused kernel.
    """

    key: tuple[str, str, int]
    tensor: Tensor
    roles: Roles
    axes: tuple[int, ...]
    result: Roles
    heads: int
    frame: tuple[str, int]
    number: int = -1


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
    self_keys_start: the column of `scores` at which the queries' own keys begin, where several sets of keys
        stand side by side; -1 otherwise.
    modified: the model changed its weights after the softmax; `scores` are then the logarithm of the weights
        that multiply the values.
    logits: what went into that softmax, where it is still there.
    signed: some of those weights are negative, so that they have no logarithm and no entropy.
    memory: how many of the first and of the last keys are learned, and stand for no token.
    first_head: the number of the first head in it, where a model makes one call for each head.
    opaque: it was read from the arguments of a kernel that cannot be seen into.
    origin: how it was made.
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
    self_keys_start: int = -1
    modified: bool = False
    logits: Tensor | None = None
    signed: bool = False
    memory: tuple[int, int] = (0, 0)
    first_head: int = 0
    opaque: bool = False
    origin: CallOrigin | None = None

    @property
    def heads(self) -> slice:
        """Which of the site's heads are in it."""
        return slice(self.first_head, self.first_head + self.output.shape[1])

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.scores.shape[3] if self.partial and self.scores is not None else self.value.shape[2]

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.output.shape[2]


@contextmanager
def measuring(call: Call) -> Iterator[None]:
    """A context in which a call is measured: no function mode sees it, and autocast rounds nothing."""
    device = call.output.device.type
    autocast = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    with torch._C.DisableTorchFunction(), autocast:
        yield


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
SDPA = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}


@dataclass(eq=False)
class Fused:
    """The arguments of a call to a fused kernel.

    sinks: how many columns after those of the keys its scores have, where all are at hand.
    opaque: stands for how its arguments were read, where only the kernel knows what it does with them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    scale: float | None = None
    dropout: float = 0.0
    sinks: int = 0
    opaque: tuple[object, ...] | None = None


def from_sdpa(args: Arguments, kwargs: Keywords) -> Fused:
    """Read the arguments of torch's scaled_dot_product_attention, whose causal mask is aligned at the first
    key.
    """
    arguments = dict(zip(_SDPA, args, strict=False)) | kwargs
    mask, top_left = arguments.get("attn_mask"), bool(arguments.get("is_causal"))
    conditions = Mask()
    if isinstance(mask, CausalBias):  # an object that stands for a mask: its own memory holds nothing
        top_left = mask.variant is CausalVariant.UPPER_LEFT
        conditions = Mask(causal=not top_left)
    elif mask is not None:
        conditions = Mask(tensors=(mask,))
    if top_left:
        queries, keys = arguments["query"].shape[-2], arguments["key"].shape[-2]
        if queries == keys:
            conditions = conditions & Mask(causal=True)
        else:
            allowed = torch.ones(queries, keys, dtype=torch.bool, device=arguments["query"].device).tril()
            conditions = conditions & allowed
    return Fused(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        conditions,
        arguments.get("scale"),
        arguments.get("dropout_p", 0.0),
    )


def flex_scores(args: Arguments) -> Tensor:
    """The scores (batch, heads, queries, keys) that FlexAttention takes the softmax of, as its eager form
    makes them.
    """
    from torch._higher_order_ops.flex_attention import _math_attention_inner

    query, key, value = args[:3]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).expand(query.shape[0], -1, -1, -1)
    return _math_attention_inner(query, key, value, *args[3:])[1]


def join_calls(parts: list[Call]) -> Call:
    """One call of several that a model made for one head each, or for some heads each."""

    def cat(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if any(x is None for x in tensors) else torch.cat(tensors, 1)

    names = ("query", "key", "value", "output", "scores", "logits", "weights")
    whole = replace(parts[0], **{name: cat(name) for name in names})
    if any(part.mask is not parts[0].mask and _differs(part.mask, parts[0].mask) for part in parts):
        whole.mask = Mask(tensors=(torch.cat([_bias(part) for part in parts], 1),))
    whole.modified, whole.signed = any(p.modified for p in parts), any(p.signed for p in parts)
    return whole


def _differs(first: Mask, second: Mask) -> bool:
    if (first.causal, first.window, first.chunk) != (second.causal, second.window, second.chunk):
        return True
    tensors = [(*m.tensors, m.lengths, m.slopes, m.queries) for m in (first, second)]
    return len(tensors[0]) != len(tensors[1]) or any(a is not b for a, b in zip(*tensors, strict=True))


def _bias(call: Call) -> Tensor:
    """The mask of a call as something to add, (batch, heads, queries, keys)."""
    device, shape = call.output.device, (*call.output.shape[:3], call.keys)
    allowed, bias = call.mask.rectangle(
        range(call.queries), range(call.keys), call.keys - call.queries, device
    )
    added = torch.zeros(shape, device=device) if bias is None else bias.float().expand(shape)
    return added if allowed is None else added.masked_fill(~allowed, -torch.inf)
