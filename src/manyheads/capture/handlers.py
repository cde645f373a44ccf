"""The ways in which a model can make an attention call, each turned into a `Call`.

A channel is a function (mode, func, args, kwargs, out) -> what takes the place of ``out``, which the torch
function returned.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from manyheads.capture import handwritten
from manyheads.capture.axes import Roles, canonical, has_blocks, restore
from manyheads.capture.call import SDPA, Call, CallOrigin, Fused, flex_scores, from_sdpa
from manyheads.capture.call_heads import (
    broadcast_leading,
    call_form,
    is_cross,
    merged_heads,
    named_head_counts,
    proved_roles,
    set_memory_apart,
    site_of,
)
from manyheads.capture.call_rows import is_fine, is_output, weight_rows
from manyheads.capture.handwritten_call import emit_handwritten
from manyheads.capture.kernel_arguments import AttentionArguments, UnreadableError, as_heads
from manyheads.capture.kernels import (
    KernelCall,
    attended,
    by_schema,
    operators,
    read_call,
    reader_of,
    with_output,
)
from manyheads.capture.tensor_tags import NOT_MERGED, Tag
from manyheads.common.types import Arguments, Function, Keywords
from manyheads.nn.attention import attention
from manyheads.nn.mask import Mask, as_mask

if TYPE_CHECKING:
    from manyheads.capture.interceptor import Mode

Channel = Callable[["Mode", Function, Arguments, Keywords, Any], Any]
# The leading axes of a fused call, by their number, where a model follows custom.
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
    call.origin = CallOrigin(
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


def _sdpa(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    return emit_fused(mode, out, from_sdpa(args, kwargs))


def _manyheads_attention(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    mask = as_mask(kwargs.get("mask")) & Mask(
        causal=bool(kwargs.get("causal")), window=kwargs.get("window"), chunk=kwargs.get("chunk")
    )
    return emit_fused(
        mode, out, Fused(args[0], args[1], args[2], mask, kwargs.get("scale"), kwargs.get("dropout", 0.0))
    )


def _flex(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> object:
    attended, *rest = out
    with torch.no_grad():
        scores = flex_scores(args)
    return (emit_fused(mode, attended, Fused(args[0], args[1], args[2], Mask(), args[5]), scores), *rest)


def _attended(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    """The output of an opaque kernel, unless attention was seen inside."""
    reading: KernelCall = args[1]
    if mode.state.seen != reading.seen.get(id(mode.state), -1):
        return out
    return _opaque(mode, out, reading.arguments)


def _operator(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: object) -> object:
    """A registered operator of torch."""
    reader = reader_of(func)
    if reader is None:
        return out
    with mode:  # what the reader does to its arguments is followed
        arguments = read_call(by_schema(func, reader), str(func), args, kwargs)
    return with_output(out, lambda output: _opaque(mode, output, arguments))


def _opaque(mode: Mode, out: Tensor, arguments: AttentionArguments | str) -> Tensor:
    """Emit the call of an opaque kernel, or note why it cannot be read."""
    frames = mode.state.frames
    try:
        if isinstance(arguments, str):
            raise UnreadableError(arguments)
        heads = as_heads(arguments, out)
    except UnreadableError as error:
        if frames:
            mode.owner.unread[frames[-1].path] = f"attention that cannot be read: {error}"
        return out
    flow = mode.flow
    if flow.tracing:
        pairs = (heads.fused.query, arguments.query), (heads.fused.value, arguments.value)
        for moved, tensor in pairs:
            flow.put(moved, Tag(streams=flow.streams(tensor)))
    edited = emit_fused(mode, heads.output, heads.fused, heads.scores)
    result = out if edited is heads.output else heads.back(edited)
    if result is not out and arguments.out is not None:
        arguments.out.copy_(result)
    if flow.tracing:
        flow.put(result, Tag(streams=flow.streams(heads.fused.query)))
    return result


def multi_head(mode: Mode, func: Function, args: Arguments, kwargs: Keywords) -> object:
    """torch's own module dispatches once more before it does anything, so a copy that does not is run
    instead.
    """
    body = types.FunctionType(
        func.__code__,
        {**func.__globals__, "has_torch_function": lambda _: False},
        func.__name__,
        func.__defaults__,
    )
    before, mode.state.heads = mode.state.heads, args[4] if len(args) > 4 else kwargs["num_heads"]
    try:
        with mode:
            return body(*args, **kwargs)
    finally:
        mode.state.heads = before


def _matmul(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    factors = handwritten.operands(func, args, kwargs)
    contraction = None
    if factors is not None and isinstance(out, Tensor) and not out.is_nested:
        named = named_head_counts(mode) if out.dim() == 5 else ()
        path, proved = proved_roles(mode, "product", out)
        contraction = handwritten.product(mode.state.flow, *factors, out, named, path, proved)
    return emit_handwritten(mode, func, args, kwargs, out, contraction)


def _einsum(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    named = named_head_counts(mode) if out.dim() == 5 else ()
    path, proved = proved_roles(mode, "product", out)
    contraction = handwritten.einsum(mode.state.flow, args, out, named, path, proved)
    return emit_handwritten(mode, func, args, kwargs, out, contraction)


def _softmax(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: object) -> object:
    if isinstance(out, Tensor) and not out.is_nested:
        proved = proved_roles(mode, "softmax", out)[1]
        handwritten.softmax(mode.state.flow, args, kwargs, out, tuple(mode.state.frames), proved)
    return out


def _exp(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    """The last step of a softmax written as ``exp(scores - logsumexp(scores))``, or any other."""
    tag = mode.flow.get(args[0]) if args else None
    if tag is not None and tag.of is not None and tag.of.shape == out.shape:
        handwritten.softmax(mode.flow, (tag.of, -1), {}, out, tuple(mode.state.frames))
    elif mode.flow.tracing or mode.flow.tags:
        mode.flow.follow(func, args, kwargs, out)
    return out


def _setitem(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: object) -> None:
    tag = mode.flow.get(args[0])
    if tag is not None and tag.weights is not None:
        tag.modified = True
    elif mode.flow.tracing:
        mode.flow.follow(func, args, kwargs, args[0])


def _embedding(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: Any) -> Any:
    ids = args[0] if args else kwargs["input"]
    mode.state.flow.embedded(ids, out)
    if mode.owner.embedded is not None:
        mode.owner.embedded.append(ids.detach().clone())
    return out


CHANNELS: dict[Function, Channel] = (
    dict.fromkeys(SDPA, _sdpa)
    | {
        attention: _manyheads_attention,
        attended: _attended,
        torch.einsum: _einsum,
        F.embedding: _embedding,
    }
    | {torch.ops.higher_order.flex_attention: _flex, Tensor.__setitem__: _setitem}
    | dict.fromkeys(handwritten.MATMULS | handwritten.ADDED_MATMULS, _matmul)
    | dict.fromkeys(handwritten.SOFTMAXES, _softmax)
    | dict.fromkeys((torch.exp, Tensor.exp), _exp)
)


def open_channels() -> None:
    """See the operators of torch that were registered, too."""
    CHANNELS.update(dict.fromkeys(operators() - CHANNELS.keys(), _operator))
