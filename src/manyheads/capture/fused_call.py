"""The call of a fused kernel: torch's scaled dot product attention, FlexAttention, our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from manyheads.capture.axes import Roles, canonical, has_blocks, restore
from manyheads.capture.call import Call, Fused, Origin
from manyheads.capture.call_heads import (
    broadcast_leading,
    call_form,
    is_cross,
    merged_heads,
    proved_roles,
    set_memory_apart,
    site_of,
)
from manyheads.capture.call_rows import is_fine, is_output, weight_rows
from manyheads.capture.tensor_tags import NOT_MERGED, Tag
from manyheads.nn.mask import Mask

if TYPE_CHECKING:
    from manyheads.capture.interceptor import Mode

_LEADING: dict[int, Roles] = {2: (), 3: ("n",), 4: ("b", "h"), 5: ("b", "b", "h")}


def emit_fused(mode: Mode, out: Tensor, fused: Fused, scores: Tensor | None = None) -> Tensor:
    """Emit the call of a fused kernel."""
    state = mode.state
    custom = None if out.is_nested else _LEADING.get(out.dim())
    if not state.frames or custom is None or is_functorch_wrapped_tensor(out):
        return out
    frame, flow = state.frames[-1], state.flow
    state.seen += 1
    number, frame.contractions = frame.contractions, frame.contractions + 1
    if mode.owner.proof is not None and (frame.path, number) in mode.owner.proof.rejected:
        return out
    path, proved = proved_roles(mode, "fused", out)
    lead: Roles = custom if proved is None else proved.roles[:-2]
    mask = fused.mask
    geometry = mask.causal, mask.window, mask.chunk, fused.scale, *mask.tensors
    heads_seen = out.shape[1] if lead == ("b", "h") else 0
    mode.owner.reach(state, call_form(frame, heads_seen, out.shape[-2], fused.key.shape[-2]))
    name, again, part = state.name(frame, fused.query, fused.key, geometry)
    query_streams, key_streams = flow.streams(fused.query), flow.streams(fused.value)
    query, key, value, output = fused.query, fused.key, fused.value, out
    heads = 1
    if lead != ("b", "h"):
        if proved is not None:
            heads = proved.heads
        elif "n" in lead:
            tag = flow.get(query)
            heads = merged_heads(mode, name, frame, query.shape[0], tag.merged if tag else NOT_MERGED)
        axes = (*lead, "q", "d")
        query, key, value, output = (
            canonical(broadcast_leading(x, out.shape[:-2]) if proved else x, axes, heads)
            for x in (query, key, value, out)
        )
        mask = Mask(
            causal=mask.causal, window=mask.window, chunk=mask.chunk,
            tensors=tuple(
                canonical(x.expand(*out.shape[:-1], fused.key.shape[-2]), (*lead, "q", "k"), heads)
                for x in mask.tensors
            ),
        )  # fmt: skip
        if fused.mask.lengths is not None or fused.mask.slopes is not None or fused.mask.queries is not None:
            return out  # our own attention, whose axes are (batch, heads, ...) by definition
        scores = None if scores is None else canonical(scores, (*lead, "q", "k"), heads)
    query, key, value = (
        broadcast_leading(query, output.shape[:2]),
        broadcast_leading(key, output.shape[:1]),
        broadcast_leading(value, output.shape[:1]),
    )
    site = site_of(
        mode, frame, name, output.shape[1], key, value, is_cross(query_streams, key_streams, flow.tracing)
    )
    call = Call(site, query, key, value, output, mask, fused.scale, fused.dropout, scores)
    call.again, call.first_head = again, part * output.shape[1]
    call.blocked = has_blocks(lead)
    call.sinks, call.opaque = (0, fused.sinks), fused.opaque is not None
    set_memory_apart(call)
    call.origin = Origin(
        (path, "fused", out.dim()), fused.query, (*lead, "q", "d"), (*range(out.dim() - 1), -1),
        (*lead, "q", "d"), heads, (frame.path, frame.number), number,
    )  # fmt: skip
    if flow.ids:
        call.tokens = flow.tokens(key_streams, value.shape[0], value.shape[2])
    if fused.opaque is not None:
        _check_rows(mode, call, fused.opaque)
    edited = mode.owner.emit(call, frame)
    if edited is not None:
        out = edited if lead == ("b", "h") else restore(edited, (*lead, "q", "d"), out.shape)
    if flow.tracing:
        flow.put(out, Tag(streams=query_streams))
    return out


def _check_rows(mode: Mode, call: Call, form: tuple[object, ...]) -> None:
    """Refute a site whose kernel does not give what its arguments were taken for: a few rows are computed
    again, once for each way of reading them.
    """
    owner, key = mode.owner, (call.site.name, form, call.queries == call.keys)
    if mode.state.forward is None or key in owner.checked_forms or call.dropout or not call.output.numel():
        return  # the probe compares all rows
    owner.checked_forms.add(key)
    rows = sorted({0, call.queries // 2, call.queries - 1})
    with torch._C.DisableTorchFunction(), torch.no_grad():
        weights = weight_rows(call, range(call.output.shape[1]), rows)
        value = call.value.to(weights.dtype).repeat_interleave(weights.shape[1] // call.value.shape[1], 1)
        output = call.output[:, :, rows]
        if not is_output(weights @ value, output, weights.any(-1)):
            call.site.verified = False
            call.site.reason = "its kernel does not give what its arguments were taken for"
            call.site.refuted |= is_fine(output)
