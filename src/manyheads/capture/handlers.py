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
from torch.nn import functional as F

from manyheads.capture import handwritten
from manyheads.capture.call import SDPA, Fused, flex_scores, from_sdpa
from manyheads.capture.call_heads import named_head_counts, proved_roles
from manyheads.capture.fused_call import emit_fused
from manyheads.capture.handwritten_call import emit_handwritten
from manyheads.capture.kernel_arguments import AttentionArguments, UnreadableError, as_heads
from manyheads.capture.kernels import Reading, attended, by_schema, operators, read, reader_of, replaced
from manyheads.capture.tensor_tags import Tag
from manyheads.common.types import Arguments, Function, Keywords
from manyheads.nn.attention import attention
from manyheads.nn.mask import Mask, as_mask

if TYPE_CHECKING:
    from manyheads.capture.interceptor import Mode

Channel = Callable[["Mode", Function, Arguments, Keywords, Any], Any]


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
    reading: Reading = args[1]
    if mode.state.seen != reading.seen.get(id(mode.state), -1):
        return out
    return _opaque(mode, out, reading.arguments)


def _operator(mode: Mode, func: Function, args: Arguments, kwargs: Keywords, out: object) -> object:
    """A registered operator of torch."""
    reader = reader_of(func)
    if reader is None:
        return out
    with mode:  # what the reader does to its arguments is followed
        arguments = read(by_schema(func, reader), str(func), args, kwargs)
    return replaced(out, lambda output: _opaque(mode, output, arguments))


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
    ids, table = (args[0] if args else kwargs["input"]), (args[1] if len(args) > 1 else kwargs["weight"])
    mode.state.flow.embedded(ids, table.shape[0], out)
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
