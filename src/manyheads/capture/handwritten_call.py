"""The call that attention written by hand completes when its weights multiply the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from manyheads.capture import handwritten
from manyheads.capture.axes import canonical, has_blocks, restore
from manyheads.capture.call import Call, CallOrigin
from manyheads.capture.call_heads import (
    call_form,
    is_cross,
    merged_heads,
    set_memory_apart,
    site_of,
)
from manyheads.capture.tensor_tags import NOT_MERGED, Tag, Weights, memory_of, version_of
from manyheads.common.types import Arguments, Function, Keywords
from manyheads.nn.mask import Mask

if TYPE_CHECKING:
    from manyheads.capture.frame import Frame
    from manyheads.capture.interceptor import Mode, State


def emit_handwritten(
    mode: Mode,
    func: Function,
    args: Arguments,
    kwargs: Keywords,
    out: Tensor,
    contraction: handwritten.Contraction | None,
) -> Tensor:
    """Emit the call that hand-written attention has just completed, if it has."""
    state, flow = mode.state, mode.state.flow
    frame = _common(state, contraction.weights.frames) if contraction is not None else None
    if contraction is None or frame is None or not _is_attention(mode, frame, contraction, out):
        if flow.get(out) is None:
            flow.follow(func, args, kwargs, out)
        return out
    weights, product = contraction.weights, contraction.weights.product
    if weights.name is None:
        sizes = dict(zip(contraction.output_roles, out.shape, strict=True))
        keys = contraction.value.shape[contraction.value_roles.index("k")]
        if mode.owner.reach(state, call_form(frame, sizes.get("h", 0), sizes["q"], keys)) and "h" in sizes:
            state.unreached.add(frame.path)  # its axes were read by the proof before
        name, _, part = state.name(frame, out if product is None else product.query)
        weights.name, weights.part, again = name, part, False
    else:
        name, part, again = weights.name, weights.part, True
    heads = 1
    merged = next((role for role in contraction.output_roles if role in ("n", "m")), None)
    if merged is not None:
        tag = flow.get(contraction.value)
        hint = product.merged if product and product.merged[0] else tag.merged if tag else NOT_MERGED
        size = out.shape[contraction.output_roles.index(merged)]
        heads = product.heads if product and product.heads else merged_heads(mode, name, frame, size, hint)
    output = canonical(out, contraction.output_roles, heads)
    if "q" in contraction.value_roles:  # values of their own for each query, added to those of the keys
        assert weights.value is not None
        value = weights.value
    else:
        value = canonical(contraction.value, contraction.value_roles, heads)
    if (
        contraction.value_roles.count("b") < contraction.output_roles.count("b") > 1
    ):  # blocks that all read the same keys
        value = value.repeat_interleave(output.shape[0] // value.shape[0], 0)
    partial = product is not None and product.joint and contraction.factor.shape != weights.scores.shape
    scores, modified, signed = _used_scores(contraction, heads, partial)
    query = key = None
    if product is not None and not product.joint:
        query, key = (
            canonical(product.query, product.query_roles, heads),
            canonical(product.key, product.key_roles, heads),
        )
    sinks = 0 if partial else scores.shape[-1] - value.shape[2]
    if sinks < 0 or scores.shape[1:3] != output.shape[1:3]:
        flow.follow(func, args, kwargs, out)
        return out
    weights.value = value
    query_streams, key_streams = (product.streams if product else 0), flow.streams(contraction.value)
    if partial and product is not None:
        key_streams = product.key_streams
    site = site_of(
        mode, frame, name, output.shape[1], key, value, is_cross(query_streams, key_streams, flow.tracing)
    )
    before = 0 if partial or modified else contraction.tag.before
    call = Call(
        site, query, key, value, output, Mask(), scores=scores, sinks=(before, sinks - before),
        blocked=has_blocks(contraction.output_roles), partial=partial,
        self_keys_start=product.self_keys_start if product else -1, modified=modified, signed=signed,
        first_head=part * output.shape[1],
    )  # fmt: skip
    if flow.ids and not (call.blocked or partial):
        call.tokens = flow.tokens(key_streams, value.shape[0], value.shape[2])
    call.again = again
    set_memory_apart(call)
    call.origin = _origin(weights, frame, heads)
    if contraction.tag.kept is None and contraction.tag.roles is not None and not partial:
        call.weights = canonical(contraction.factor, contraction.tag.roles, heads)
    if (
        modified
        and not _is_overwritten(contraction)
        and memory_of(weights.scores) != memory_of(contraction.factor)
    ):
        logits = canonical(weights.scores, weights.roles, heads)
        call.logits = logits if logits.shape == scores.shape else None
    _note(call, contraction)
    edited = mode.owner.emit(call, frame)
    if edited is not None:
        out = restore(edited, contraction.output_roles, out.shape)
    if flow.tracing:
        flow.put(out, Tag(streams=query_streams or key_streams))
    return out


def _is_attention(mode: Mode, frame: Frame, contraction: handwritten.Contraction, out: Tensor) -> bool:
    """Whether a product of weights and values is attention over tokens, as far as that was disproved."""
    number, frame.contractions = frame.contractions, frame.contractions + 1
    mode.state.seen += 1
    proof = mode.owner.proof
    shapes = (
        len(contraction.value_roles) == contraction.value.dim() and len(contraction.output_roles) == out.dim()
    )
    axes = {"q", "d"} <= set(contraction.output_roles) and {"k", "d"} <= set(contraction.value_roles)
    if is_functorch_wrapped_tensor(out) or (
        "q" in contraction.value_roles and contraction.weights.value is None
    ):
        return False
    return shapes and axes and (proof is None or (frame.path, number) not in proof.rejected)


def _origin(weights: Weights, frame: Frame, heads: int) -> CallOrigin:
    product, run = weights.product, (frame.path, frame.number)
    if product is not None:
        return CallOrigin(
            product.origin,
            product.query,
            product.query_roles,
            product.axes,
            product.result,
            heads,
            run,
            frame.contractions - 1,
        )
    axes = tuple(range(weights.scores.dim()))
    key = (weights.frames[-1].path if weights.frames else "", "softmax", weights.scores.dim())
    return CallOrigin(
        key, weights.scores, weights.roles, axes, weights.roles, heads, run, frame.contractions - 1
    )


def _note(call: Call, contraction: handwritten.Contraction) -> None:
    """Say at the site what the model did to its weights after the softmax."""
    if call.modified and not (call.site.notes and call.again):
        call.site.note(
            "the model changes its weights after the softmax: the numbers are of the weights it uses"
        )
        if call.signed:
            call.site.note("some weights are negative: they have no entropy, confidence or distance")
        elif call.scores is not None and call.scores.device.type != "meta":
            mass = call.scores.exp().sum(-1)
            if bool(((mass - 1).abs() > 1e-3).any()):
                call.site.note(
                    "rows of weights do not sum to one: entropy and distance are of the normalised ones"
                )


def _used_scores(
    contraction: handwritten.Contraction, heads: int, partial: bool
) -> tuple[Tensor, bool, bool]:
    """The scores whose softmax is the weights that multiply the values, (batch, heads, queries, keys);
    whether the model changed its weights after its own softmax, and whether some are negative.

    Where nothing was changed but rows that became zero they are what went into the softmax, else the
    logarithm of the weights.
    """
    weights, tag = contraction.weights, contraction.tag
    scores, is_overwritten = canonical(weights.scores, weights.roles, heads), _is_overwritten(contraction)
    if partial or not (tag.modified or is_overwritten):
        return scores, False, False
    factor, roles = tag.kept or (contraction.factor, tag.roles)
    assert roles is not None  # the weights have axes, or there were no contraction
    used_weights = canonical(factor.detach(), roles, heads)
    used_weights = used_weights.to(torch.promote_types(used_weights.dtype, torch.float32))
    signed = bool((used_weights < 0).any()) if used_weights.device.type != "meta" else False
    if (
        not (is_overwritten or signed)
        and used_weights.shape == scores.shape
        and used_weights.device.type != "meta"
    ):
        softmax_weights = (
            scores.detach()
            .to(used_weights.dtype)
            .softmax(-1)
            .masked_fill_(~used_weights.any(-1, keepdim=True), 0.0)
        )
        if torch.allclose(softmax_weights, used_weights, rtol=1e-3, atol=1e-6):
            return scores, False, False
    return used_weights.clamp(min=0.0).log(), True, signed


def _is_overwritten(contraction: handwritten.Contraction) -> bool:
    """Whether the memory of the scores was written to after the softmax had read them."""
    scores, version = contraction.weights.scores, contraction.weights.version
    if version >= 0:
        return version != version_of(scores)
    rows, roles = scores.detach(), contraction.weights.roles  # torch does not count: look at the last queries
    if (
        roles != contraction.tag.roles
        or rows.shape != contraction.factor.shape
        or contraction.tag.kept is not None
    ):
        return False
    query_axis, key_axis = roles.index("q"), roles.index("k")
    last = (
        [x.detach().select(query_axis, -1) for x in (rows, contraction.factor)]
        if rows.shape[query_axis]
        else []
    )
    key_axis -= key_axis > query_axis
    return bool(last) and not torch.allclose(last[0].float().softmax(key_axis), last[1].float(), atol=1e-2)


def _common(state: State, then_running: tuple[Frame, ...]) -> Frame | None:
    """The innermost module that was running at the softmax and still is."""
    common = None
    for then, now in zip(then_running, state.frames, strict=False):
        if then is not now:
            break
        common = now
    return common
