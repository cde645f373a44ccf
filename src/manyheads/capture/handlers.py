"""The ways in which a model can make an attention call, each turned into a `Call`.

A channel is a function (mode, func, args, kwargs) -> what the torch function returns, perhaps edited.
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
from manyheads.capture.call import SDPA, Call, Fused, Origin, flex_scores, from_sdpa
from manyheads.capture.call_rows import score_rows
from manyheads.capture.site import Site
from manyheads.capture.tensor_tags import NOT_MERGED, Merged, Tag, Weights, memory_of, version_of
from manyheads.nn.attention import attention
from manyheads.nn.mask import Mask, as_mask

if TYPE_CHECKING:
    from manyheads.capture.interceptor import Frame, Mode, State
    from manyheads.capture.proof import Step

Channel = Callable[["Mode", Any, tuple[Any, ...], dict[str, Any]], Any]

_LEADING: dict[int, Roles] = {2: (), 3: ("n",), 4: ("b", "h"), 5: ("b", "b", "h")}
# Where modules keep their number of heads, for a merged (batch * heads) axis that came from an unseen
# reshape.
_HEADS_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")


def _sdpa(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _fused(mode, func(*args, **kwargs), from_sdpa(args, kwargs))


def _ours(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    mask = as_mask(kwargs.get("mask")) & Mask(
        causal=bool(kwargs.get("causal")), window=kwargs.get("window"), chunk=kwargs.get("chunk")
    )
    return _fused(
        mode, out, Fused(args[0], args[1], args[2], mask, kwargs.get("scale"), kwargs.get("dropout", 0.0))
    )


def _flex(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out, *rest = func(*args, **kwargs)
    with torch.no_grad():
        scores = flex_scores(args)
    return (_fused(mode, out, Fused(args[0], args[1], args[2], Mask(), args[5]), scores), *rest)


def _multi_head(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _matmul(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    factors = handwritten.operands(func, args, kwargs)
    found = None
    if factors is not None and isinstance(out, Tensor) and not out.is_nested:
        named = _named(mode) if out.dim() == 5 else ()
        path, proved = _proved(mode, "product", out)
        found = handwritten.product(mode.state.flow, *factors, out, named, path, proved)
    return _written(mode, func, args, kwargs, out, found)


def _einsum(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    named = _named(mode) if out.dim() == 5 else ()
    path, proved = _proved(mode, "product", out)
    found = handwritten.einsum(mode.state.flow, args, out, named, path, proved)
    return _written(mode, func, args, kwargs, out, found)


def _softmax(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and not out.is_nested:
        proved = _proved(mode, "softmax", out)[1]
        handwritten.softmax(mode.state.flow, args, kwargs, out, tuple(mode.state.frames), proved)
    return out


def _proved(mode: Mode, kind: str, out: Tensor) -> tuple[str, handwritten.Proved | None]:
    """The module that is running, and what was proved of the axes that its functions of this kind give."""
    frames = mode.state.frames
    path = frames[-1].path if frames else ""
    if frames:
        ran, frames[-1].functions = frames[-1].functions, 0
        mode.owner.reach(mode.state, (path, kind, out.dim(), ran))
    proof = mode.owner.proof
    found = proof.roles.get((path, kind, out.dim())) if proof is not None and proof.roles else None
    return path, None if found is None else handwritten.Proved(*found)


def _exp(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The last step of a softmax written as ``exp(scores - logsumexp(scores))``, or any other."""
    out = func(*args, **kwargs)
    tag = mode.flow.get(args[0]) if args else None
    if tag is not None and tag.of is not None and tag.of.shape == out.shape:
        handwritten.softmax(mode.flow, (tag.of, -1), {}, out, tuple(mode.state.frames))
    elif mode.flow.tracing or mode.flow.tags:
        mode.flow.follow(func, args, kwargs, out)
    return out


def _setitem(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func(*args, **kwargs)
    tag = mode.flow.get(args[0])
    if tag is not None and tag.weights is not None:
        tag.modified = True
    elif mode.flow.tracing:
        mode.flow.follow(func, args, kwargs, args[0])


def _embedding(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    ids, table = (args[0] if args else kwargs["input"]), (args[1] if len(args) > 1 else kwargs["weight"])
    mode.state.flow.embedded(ids, table.shape[0], out)
    if mode.owner.embedded is not None:
        mode.owner.embedded.append(ids.detach().clone())
    return out


def _fused(mode: Mode, out: Tensor, given: Fused, scores: Tensor | None = None) -> Tensor:
    """Emit the call of a fused kernel."""
    state = mode.state
    custom = None if out.is_nested else _LEADING.get(out.dim())
    if not state.frames or custom is None or is_functorch_wrapped_tensor(out):
        return out
    frame, flow = state.frames[-1], state.flow
    number, frame.contractions = frame.contractions, frame.contractions + 1
    if mode.owner.proof is not None and (frame.path, number) in mode.owner.proof.rejected:
        return out
    path, proved = _proved(mode, "fused", out)
    lead: Roles = custom if proved is None else proved.roles[:-2]
    mask = given.mask
    geometry = mask.causal, mask.window, mask.chunk, given.scale, *mask.tensors
    heads_seen = out.shape[1] if lead == ("b", "h") else 0
    mode.owner.reach(state, _form(frame, heads_seen, out.shape[-2], given.key.shape[-2]))
    name, again, part = state.name(frame, given.query, given.key, geometry)
    mine, theirs = flow.streams(given.query), flow.streams(given.value)
    query, key, value, output = given.query, given.key, given.value, out
    heads = 1
    if lead != ("b", "h"):
        if proved is not None:
            heads = proved.heads
        elif "n" in lead:
            tag = flow.get(query)
            heads = _heads(mode, name, frame, query.shape[0], tag.merged if tag else NOT_MERGED)
        axes = (*lead, "q", "d")
        query, key, value, output = (
            canonical(_broadcast(x, out.shape[:-2]) if proved else x, axes, heads)
            for x in (query, key, value, out)
        )
        mask = Mask(
            causal=mask.causal, window=mask.window, chunk=mask.chunk,
            tensors=tuple(
                canonical(x.expand(*out.shape[:-1], given.key.shape[-2]), (*lead, "q", "k"), heads)
                for x in mask.tensors
            ),
        )  # fmt: skip
        if given.mask.lengths is not None or given.mask.slopes is not None or given.mask.queries is not None:
            return out  # our own attention, whose axes are (batch, heads, ...) by definition
        scores = None if scores is None else canonical(scores, (*lead, "q", "k"), heads)
    query, key, value = (
        _broadcast(query, output.shape[:2]),
        _broadcast(key, output.shape[:1]),
        _broadcast(value, output.shape[:1]),
    )
    site = _site(mode, frame, name, output.shape[1], key, value, _cross(mine, theirs, flow.tracing))
    call = Call(site, query, key, value, output, mask, given.scale, given.dropout, scores)
    call.again, call.first_head = again, part * output.shape[1]
    call.blocked = has_blocks(lead)
    _set_memory_apart(call)
    call.origin = Origin(
        (path, "fused", out.dim()), given.query, (*lead, "q", "d"), (*range(out.dim() - 1), -1),
        (*lead, "q", "d"), heads, (frame.path, frame.number), number,
    )  # fmt: skip
    if flow.ids:
        call.tokens = flow.tokens(theirs, value.shape[0], value.shape[2])
    edited = mode.owner.emit(call, frame)
    if edited is not None:
        out = edited if lead == ("b", "h") else restore(edited, (*lead, "q", "d"), out.shape)
    if flow.tracing:
        flow.put(out, Tag(streams=mine))
    return out


def _form(frame: Frame, heads: int, queries: int, keys: int) -> Step:
    """What calls of one code path have in common: the heads, and whether queries come in pieces."""
    return "call", frame.path, heads, 1 < queries < keys


def _site(
    mode: Mode, frame: Frame, name: str, heads: int, key: Tensor | None, value: Tensor, cross: bool | None
) -> Site:
    """The site of a call with so many heads, which may be some of all."""
    proof = mode.owner.proof
    count = heads if proof is None else proof.heads.get(frame.path, heads)

    def kv_heads() -> tuple[int, ...]:
        here = _kv_heads(key, value, heads)
        step = max(here) + 1 if here else 0
        return tuple(number + step * part for part in range(count // max(1, heads)) for number in here)

    return mode.owner.site(name, count, kv_heads, cross)


def _written(
    mode: Mode,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Tensor,
    found: handwritten.Contraction | None,
) -> Tensor:
    """Emit the call that hand-written attention has just completed, if it has."""
    state, flow = mode.state, mode.state.flow
    frame = _common(state, found.weights.place) if found is not None else None
    if found is None or frame is None or not _is_attention(mode, frame, found, out):
        if flow.get(out) is None:
            flow.follow(func, args, kwargs, out)
        return out
    weights, product = found.weights, found.weights.product
    if weights.name is None:
        sizes = dict(zip(found.output_roles, out.shape, strict=True))
        keys = found.value.shape[found.value_roles.index("k")]
        if mode.owner.reach(state, _form(frame, sizes.get("h", 0), sizes["q"], keys)) and "h" in sizes:
            state.unreached.add(_origin(weights, frame, 1).key)  # its axes were read by the proof before
        name, _, part = state.name(frame, out if product is None else product.query)
        weights.name, weights.part, again = name, part, False
    else:
        name, part, again = weights.name, weights.part, True
    heads = 1
    merged = next((role for role in found.output_roles if role in ("n", "m")), None)
    if merged is not None:
        tag = flow.get(found.value)
        hint = product.merged if product and product.merged[0] else tag.merged if tag else NOT_MERGED
        size = out.shape[found.output_roles.index(merged)]
        heads = product.heads if product and product.heads else _heads(mode, name, frame, size, hint)
    output = canonical(out, found.output_roles, heads)
    if "q" in found.value_roles:  # values of their own for each query, added to those of the keys
        assert weights.value is not None
        value = weights.value
    else:
        value = canonical(found.value, found.value_roles, heads)
    if found.value_roles.count("b") < found.output_roles.count("b") > 1:  # blocks that all read the same keys
        value = value.repeat_interleave(output.shape[0] // value.shape[0], 0)
    partial = product is not None and product.joint and found.factor.shape != weights.scores.shape
    scores, modified, signed = _used(found, heads, partial)
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
    mine, theirs = (product.streams if product else 0), flow.streams(found.value)
    if partial and product is not None:
        theirs = product.key_streams
    site = _site(mode, frame, name, output.shape[1], key, value, _cross(mine, theirs, flow.tracing))
    before = 0 if partial or modified else found.tag.before
    call = Call(
        site, query, key, value, output, Mask(), scores=scores, sinks=(before, sinks - before),
        blocked=has_blocks(found.output_roles), partial=partial, own=product.own if product else -1,
        modified=modified, signed=signed, first_head=part * output.shape[1],
    )  # fmt: skip
    if flow.ids and not (call.blocked or partial):
        call.tokens = flow.tokens(theirs, value.shape[0], value.shape[2])
    call.again = again
    _set_memory_apart(call)
    call.origin = _origin(weights, frame, heads)
    if found.tag.kept is None and found.tag.roles is not None and not partial:
        call.weights = canonical(found.factor, found.tag.roles, heads)
    if modified and not _overwritten(found) and memory_of(weights.scores) != memory_of(found.factor):
        logits = canonical(weights.scores, weights.roles, heads)
        call.logits = logits if logits.shape == scores.shape else None
    _note(call, found)
    edited = mode.owner.emit(call, frame)
    if edited is not None:
        out = restore(edited, found.output_roles, out.shape)
    if flow.tracing:
        flow.put(out, Tag(streams=mine or theirs))
    return out


def _is_attention(mode: Mode, frame: Frame, found: handwritten.Contraction, out: Tensor) -> bool:
    """Whether a product of weights and values is attention over tokens, as far as that was disproved."""
    number, frame.contractions = frame.contractions, frame.contractions + 1
    proof = mode.owner.proof
    shapes = len(found.value_roles) == found.value.dim() and len(found.output_roles) == out.dim()
    axes = {"q", "d"} <= set(found.output_roles) and {"k", "d"} <= set(found.value_roles)
    if is_functorch_wrapped_tensor(out) or ("q" in found.value_roles and found.weights.value is None):
        return False
    return shapes and axes and (proof is None or (frame.path, number) not in proof.rejected)


def _set_memory_apart(call: Call) -> None:
    """Learned keys, where a site was proved to have some, have weights but no place among the tokens."""
    own = call.site.own
    if not call.site.memory or own is None or own[1] is None or call.keys - call.queries < own[0] + own[1]:
        return
    call.memory = own[0], own[1]
    if call.scores is None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            call.scores = score_rows(call, list(range(call.output.shape[1])), list(range(call.queries)))


def _origin(weights: Weights, frame: Frame, heads: int) -> Origin:
    product, run = weights.product, (frame.path, frame.number)
    if product is not None:
        return Origin(
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
    key = (weights.place[-1].path if weights.place else "", "softmax", weights.scores.dim())
    return Origin(key, weights.scores, weights.roles, axes, weights.roles, heads, run, frame.contractions - 1)


def _note(call: Call, found: handwritten.Contraction) -> None:
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


def _used(found: handwritten.Contraction, heads: int, partial: bool) -> tuple[Tensor, bool, bool]:
    """The scores whose softmax is the weights that multiply the values, (batch, heads, queries, keys);
    whether the model changed its weights after its own softmax, and whether some are negative.

    Where nothing was changed but rows that became zero they are what went into the softmax, else the
    logarithm of the weights.
    """
    weights, tag = found.weights, found.tag
    scores, overwritten = canonical(weights.scores, weights.roles, heads), _overwritten(found)
    if partial or not (tag.modified or overwritten):
        return scores, False, False
    factor, roles = tag.kept or (found.factor, tag.roles)
    assert roles is not None  # the weights have axes, or there were no contraction
    used = canonical(factor.detach(), roles, heads)
    used = used.to(torch.promote_types(used.dtype, torch.float32))
    signed = bool((used < 0).any()) if used.device.type != "meta" else False
    if not (overwritten or signed) and used.shape == scores.shape and used.device.type != "meta":
        kept = scores.detach().to(used.dtype).softmax(-1).masked_fill_(~used.any(-1, keepdim=True), 0.0)
        if torch.allclose(kept, used, rtol=1e-3, atol=1e-6):
            return scores, False, False
    return used.clamp(min=0.0).log(), True, signed


def _overwritten(found: handwritten.Contraction) -> bool:
    """Whether somebody wrote to the memory of the scores after the softmax had read them."""
    scores, version = found.weights.scores, found.weights.version
    if version >= 0:
        return version != version_of(scores)
    rows, roles = scores.detach(), found.weights.roles  # torch does not count: look at the last queries
    if roles != found.tag.roles or rows.shape != found.factor.shape or found.tag.kept is not None:
        return False
    where, keys = roles.index("q"), roles.index("k")
    last = [x.detach().select(where, -1) for x in (rows, found.factor)] if rows.shape[where] else []
    keys -= keys > where
    return bool(last) and not torch.allclose(last[0].float().softmax(keys), last[1].float(), atol=1e-2)


def _broadcast(x: Tensor, lead: torch.Size) -> Tensor:
    """Queries, keys or values that a kernel repeated along the first axes of its output."""
    return x if x.shape[: len(lead)] == lead else x.expand(*lead, *x.shape[len(lead) :])


def _common(state: State, place: tuple[Any, ...]) -> Frame | None:
    """The innermost module that was running at the softmax and still is."""
    common = None
    for then, now in zip(place, state.frames, strict=False):
        if then is not now:
            break
        common = now
    return common


def _heads(mode: Mode, name: str, frame: Frame, merged: int, followed: Merged) -> int:
    """How many heads a merged axis (batch * heads) holds."""
    known = mode.owner.sites.by_name.get(name)
    for heads in (
        known.heads if known else 0,
        mode.state.heads,
        followed[0] if followed[1] == merged else 0,
        *_attributes(frame),
    ):
        if heads > 0 and merged % heads == 0:
            return heads
    return 1


def _named(mode: Mode) -> list[int]:
    """The numbers of heads that the innermost module which names any does name."""
    return next((found for frame in reversed(mode.state.frames) if (found := _attributes(frame))), [])


def _attributes(frame: Frame) -> list[int]:
    found = (getattr(frame.module, attribute, None) for attribute in _HEADS_ATTRIBUTES)
    return [heads for heads in found if isinstance(heads, int)]


def _cross(mine: int, theirs: int, tracing: bool) -> bool | None:
    return not mine & theirs if tracing and mine and theirs else None


def _kv_heads(key: Tensor | None, value: Tensor, heads: int) -> tuple[int, ...]:
    """Which key head each head reads. Heads whose keys and values are the same to the bit read a repeated
    one.
    """
    kv_heads = value.shape[1]
    if kv_heads != heads:
        return tuple(head * kv_heads // heads for head in range(heads))
    if not value.numel() or value.device.type == "meta":
        return tuple(range(heads))
    parts = [value] if key is None or key.shape[1] != heads else [key, value]
    sample = torch.cat([x[:1, :, -8:].detach().flatten(2) for x in parts], -1)[0]  # (heads, numbers)
    if value.device.type == "meta" or not sample.numel():
        return tuple(range(heads))
    with torch._C.DisableTorchFunction():  # many small steps, which no mode around this one needs to see
        same = (sample[:, None] == sample).all(-1).tolist()  # (heads, heads)
        some = sample.any(-1).tolist()
    found: list[int] = []
    first: list[int] = []  # one head of each key head
    for head in range(heads):
        twin = next((i for i, other in enumerate(first) if some[head] and same[head][other]), None)
        if twin is None:
            twin = len(first)
            first.append(head)
        found.append(twin)
    return tuple(found)


CHANNELS: dict[Any, Channel] = (
    dict.fromkeys(SDPA, _sdpa)
    | {
        attention: _ours,
        F.multi_head_attention_forward: _multi_head,
        torch.einsum: _einsum,
        F.embedding: _embedding,
    }
    | {torch.ops.higher_order.flex_attention: _flex, Tensor.__setitem__: _setitem}
    | dict.fromkeys(handwritten.MATMULS | handwritten.ADDED_MATMULS, _matmul)
    | dict.fromkeys(handwritten.SOFTMAXES, _softmax)
    | dict.fromkeys((torch.exp, Tensor.exp), _exp)
)
