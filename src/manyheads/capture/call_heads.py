"""What every attention call needs: what was proved of its axes, its site, its heads and key heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.capture import handwritten
from manyheads.capture.call import Call
from manyheads.capture.call_rows import score_rows
from manyheads.capture.site import Site
from manyheads.capture.tensor_tags import Merged

if TYPE_CHECKING:
    from manyheads.capture.frame import Frame
    from manyheads.capture.interceptor import Mode
    from manyheads.capture.proof import Step

# Where modules keep their number of heads, for a merged (batch * heads) axis that came from an unseen
# reshape.
_HEADS_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")


def proved_roles(mode: Mode, kind: str, out: Tensor) -> tuple[str, handwritten.Proved | None]:
    """The module that is running, and what was proved of the axes that its functions of this kind give."""
    frames = mode.state.frames
    path = frames[-1].path if frames else ""
    if frames:
        functions, frames[-1].functions = frames[-1].functions, 0
        mode.owner.reach(mode.state, (path, kind, out.dim(), functions))
    proof = mode.owner.proof
    roles = proof.roles.get((path, kind, out.dim())) if proof is not None and proof.roles else None
    return path, None if roles is None else handwritten.Proved(*roles)


def call_form(frame: Frame, heads: int, queries: int, keys: int) -> Step:
    """What calls of one code path have in common: the heads, and whether queries come in pieces."""
    return "call", frame.path, heads, 1 < queries < keys


def site_of(
    mode: Mode, frame: Frame, name: str, heads: int, key: Tensor | None, value: Tensor, cross: bool | None
) -> Site:
    """The site of a call with this many heads, which may be some of the site's heads."""
    proof = mode.owner.proof
    count = heads if proof is None else proof.heads.get(frame.path, heads)

    def kv_heads() -> tuple[int, ...]:
        numbers = _kv_heads(key, value, heads)
        step = max(numbers) + 1 if numbers else 0
        return tuple(number + step * part for part in range(count // max(1, heads)) for number in numbers)

    return mode.owner.site(name, count, kv_heads, cross)


def merged_heads(mode: Mode, name: str, frame: Frame, merged: int, followed: Merged) -> int:
    """How many heads a merged axis (batch * heads) holds."""
    site = mode.owner.sites.by_name.get(name)
    for heads in (
        site.heads if site else 0,
        mode.state.heads,
        followed[0] if followed[1] == merged else 0,
        *_attributes(frame),
    ):
        if heads > 0 and merged % heads == 0:
            return heads
    return 1


def named_head_counts(mode: Mode) -> list[int]:
    """The numbers of heads that the innermost module which names any does name."""
    return next((counts for frame in reversed(mode.state.frames) if (counts := _attributes(frame))), [])


def _attributes(frame: Frame) -> list[int]:
    counts = (getattr(frame.module, attribute, None) for attribute in _HEADS_ATTRIBUTES)
    return [heads for heads in counts if isinstance(heads, int)]


def _kv_heads(key: Tensor | None, value: Tensor, heads: int) -> tuple[int, ...]:
    """Which key head each head reads. Heads whose keys and values are the same to the bit read a repeated
    one, unless the proof shows that weights of their own made them (`SiteProof.kv_heads`).
    """
    kv_heads = value.shape[1]
    if kv_heads != heads:
        return tuple(head * kv_heads // heads for head in range(heads))
    if not value.numel() or value.device.type == "meta":
        return tuple(range(heads))
    parts = [value] if key is None or key.shape[1] != heads else [key, value]
    sample = torch.cat([x[:1, :, -8:].detach().flatten(2) for x in parts], -1)[0]  # (heads, numbers)
    if not sample.numel():
        return tuple(range(heads))
    with torch._C.DisableTorchFunction():  # many small steps, which no mode around this one needs to see
        is_equal = (sample[:, None] == sample).all(-1).tolist()  # (heads, heads)
        is_nonzero = sample.any(-1).tolist()
    key_heads: list[int] = []
    first: list[int] = []  # one head of each key head
    for head in range(heads):
        twin = next((i for i, other in enumerate(first) if is_nonzero[head] and is_equal[head][other]), None)
        if twin is None:
            twin = len(first)
            first.append(head)
        key_heads.append(twin)
    return tuple(key_heads)


def is_cross(query_streams: int, key_streams: int, tracing: bool) -> bool | None:
    return not query_streams & key_streams if tracing and query_streams and key_streams else None


def broadcast_leading(x: Tensor, lead: torch.Size) -> Tensor:
    """Queries, keys or values that a kernel repeated along the first axes of its output."""
    return x if x.shape[: len(lead)] == lead else x.expand(*lead, *x.shape[len(lead) :])


def set_memory_apart(call: Call) -> None:
    """Learned keys, where a site was proved to have some, have weights but no place among the tokens."""
    margins = call.site.key_margins
    if (
        not call.site.memory
        or margins is None
        or margins[1] is None
        or call.keys - call.queries < margins[0] + margins[1]
    ):
        return
    call.memory = margins[0], margins[1]
    if call.scores is None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            call.scores = score_rows(call, list(range(call.output.shape[1])), list(range(call.queries)))
