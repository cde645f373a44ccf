"""What a call's mask says about its keys: which are padding, whether a query looks ahead, where the queries
stand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.heads.calls import Call
from manyheads.nn.mask import Mask
from manyheads.nn.statistics import HIDING


class Visible(NamedTuple):
    """What the mask of a call says.

    real: (batch or 1, keys) False for a key that nobody may attend to, i.e. padding; None when all are real.
    offset: the position among the keys at which query 0 stands.
    ahead: whether a query may attend to a key after its own; None when one query alone cannot tell.
    aligned: whether that is where the queries stand. Pooled queries, pooled keys, and blocks that read their
        neighbours have no such place.
    """

    real: Tensor | None
    offset: int
    ahead: bool | None
    aligned: bool = True


def without_dead_rows(call: Call) -> Call:
    """Queries whose weights were set to zero after the softmax attend to nothing, whatever their scores."""
    if call.scores is None or call.weights is None:
        return call
    dead = ~call.weights.any(-1, keepdim=True)
    return replace(call, scores=call.scores.masked_fill(dead, -torch.inf)) if bool(dead.any()) else call


def visible(call: Call) -> Visible:
    """Look at who may attend to whom in a call.

    A cache that was made longer than it is filled has hidden keys at its end: queries stand before them.
    """
    look = _look_at_call(call)
    if call.queries == call.keys or not (call.blocked or look.ahead):
        return look
    return Visible(look.real, call.keys - call.queries, True, aligned=False)


def _look_at_call(call: Call) -> Visible:
    queries, keys = call.queries, call.keys
    if call.scores is not None:
        left = call.sinks[0]
        return _look(call.scores[..., left : left + keys] > HIDING, queries, keys)
    mask = call.mask
    if not mask.tensors:
        real = None
        if mask.lengths is not None:
            real = torch.arange(keys, device=mask.lengths.device) < mask.lengths[:, None]
        return Visible(real, keys - queries, None if queries == 1 else _looks_ahead(mask))
    return _look_at(mask, queries, keys, call.value.device)


def told(call: Call, look: Visible) -> Tensor | None:
    """Let the site of a call know what the call tells of its kind; which queries are no padding.

    (batch or 1, queries) on the device of the call, or None when every query counts.
    """
    site = call.site
    if site.cross is None and call.queries > 1:
        site.cross = call.queries != call.keys and bool(look.ahead) and not call.blocked
    site.ahead |= bool(look.ahead)
    site.causal |= look.ahead is False
    site.cached |= call.queries < call.keys and not site.cross and look.aligned
    first = look.offset if look.aligned else call.own
    if look.real is None or site.cross or first < 0:
        return None
    return look.real[:, first : first + call.queries].to(call.output.device)


def _look_at(mask: Mask, queries: int, keys: int, device: torch.device) -> Visible:
    if queries > 1 and all(tensor.dim() < 2 or tensor.shape[-2] == 1 for tensor in mask.tensors):
        geometry = Mask(causal=mask.causal, window=mask.window, chunk=mask.chunk)
        same_for_all = _look_at(Mask(lengths=mask.lengths, tensors=mask.tensors), 1, keys, device)
        return Visible(same_for_all.real, keys - queries, _looks_ahead(geometry))
    allowed, bias = mask.rectangle(range(queries), range(keys), keys - queries, device)
    if bias is not None:
        shown = bias > HIDING
        allowed = shown if allowed is None else allowed & shown
    if allowed is None:
        return Visible(None, keys - queries, None if queries == 1 else True)
    return _look(allowed[(None,) * (4 - allowed.dim())], queries, keys)


def _looks_ahead(mask: Mask) -> bool:
    return not mask.causal and (mask.window is None or mask.window > 1) and mask.chunk != 1


def _look(allowed: Tensor, queries: int, keys: int) -> Visible:
    """From ``allowed``, a boolean that broadcasts to (batch, heads, queries, keys)."""
    real = allowed.any(2).any(1).expand(-1, keys)
    offset = keys - queries
    if offset > 0:
        last = allowed[:, :, -1].any(0).any(0).expand(keys).nonzero()
        if last.numel():
            offset = max(0, int(last[-1]) + 1 - queries)
    ahead = None if queries == 1 else bool(allowed.expand(-1, -1, queries, keys).triu(offset + 1).any())
    if ahead:
        offset = keys - queries
    return Visible(None if bool(real.all()) else real, offset, ahead)
