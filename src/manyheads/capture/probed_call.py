"""What the first run of a probe shows of one attention call: its heads, its keys, and whether its output is
what was taken for its weights and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor

from manyheads.capture.axes import Roles
from manyheads.capture.call import Call, CallOrigin
from manyheads.capture.call_rows import is_output, weight_rows
from manyheads.capture.dependence import NO_WEIGHTS, Leaf, Marks
from manyheads.capture.head_axes import Axis, agree, keys_are_tokens, origins, roles_from
from manyheads.capture.mask_reading import find_unmasked
from manyheads.nn.mask import Mask

_PIECE = 2**24  # scores that are looked at together
NOTHING_TELLS = "no weights are behind its queries, so that nothing tells its heads"


@dataclass(eq=False)
class ProbedCall:
    """What the first run shows of one attention call.

    call: its sizes and settings. Its tensors have no numbers any more: of images there are gigabytes.
    reads: (queries, keys) where some sequence and head has a weight.
    rows, data: the weights and the tokens that its queries depend on.
    problem: why nothing is proved of it.
    wanted: what the axes of its product are and the heads in a merged one, where custom has it wrong.
    tokens: its keys are tokens.
    readers: for each product with weights that reads its output, whether it reads nothing else.
    kv_heads: the key head that each head reads.
    """

    call: Call
    output: Tensor
    reads: Tensor
    rows: frozenset[object] = frozenset()
    data: frozenset[object] = frozenset()
    problem: str = ""
    wanted: tuple[Roles, int] | None = None
    tokens: bool = True
    readers: list[bool] = field(default_factory=list)
    kv_heads: tuple[int, ...] | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    scores: Tensor | None = None  # where they are no product of queries and keys
    hidden: bytes | None = None  # stands for which scores are not those of a mask

    @property
    def origin(self) -> CallOrigin:
        """How the call was made."""
        assert self.call.origin is not None
        return self.call.origin


def record_call(call: Call, marks: Marks) -> ProbedCall:
    """Look at one call: differentiate its queries and values, and compute its output again."""
    products, reads, alive = _read(call)
    record = ProbedCall(call, marks.output(call.output), reads)
    record.query = None if call.query is None else call.query.detach().clone()
    record.key = None if call.key is None else call.key.detach().clone()
    if call.query is None or call.key is None:
        scores = softmaxed(call)
        record.scores = None if scores is None else scores.detach().clone()
    record.hidden = None if call.scores is None else shown_digest(call.scores.detach())
    if not call.again:
        _prove(record, marks, products, alive)
    record.call = _emptied(call)
    return record


def softmaxed(call: Call) -> Tensor | None:
    """What went into the softmax of a call (batch, heads, queries, keys), where it is still there."""
    scores = call.logits if call.modified else call.scores
    return None if scores is None else scores[..., call.sinks[0] : scores.shape[-1] - call.sinks[1]]


def _prove(record: ProbedCall, marks: Marks, products: Tensor | None, alive: Tensor) -> None:
    call, origin = record.call, record.origin
    value_leaves = marks.leaves(call.value)
    record.tokens = call.partial or keys_are_tokens(call.value, value_leaves)
    if not record.tokens:
        return
    record.kv_heads = _kv_heads(call, marks)
    axes = [axis for axis, role in enumerate(origin.roles) if role not in ("k", "d")]
    leaves = marks.leaves(origin.tensor)
    sources = origins(origin.tensor, axes, leaves)
    if sources is None:
        record.problem = _heads_of_values(call, value_leaves)
    else:
        record.rows, record.data = sources.rows, sources.data
        _judge(record, axes, sources.axes, value_leaves)
        if record.wanted and all(leaf.weights == NO_WEIGHTS for leaf in leaves):
            record.wanted, record.problem = None, NOTHING_TELLS
    if not (record.problem or record.wanted or _is_formula(call, products, alive)):
        record.problem = "what was taken for its weights and values does not give its output"


def shown_digest(scores: Tensor) -> bytes:
    """Bytes that stand for which scores (batch, heads, queries, keys) are those of a mask."""
    digest = blake2b(repr(scores.shape).encode())
    for piece in scores.flatten(0, 1).split(max(1, _PIECE // max(1, scores.shape[2] * scores.shape[3]))):
        digest.update(find_unmasked(piece).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _emptied(call: Call) -> Call:
    """The call with tensors of the same shapes that take no memory, nor keep a history."""

    def empty(x: Tensor) -> Tensor:
        return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)

    def maybe(x: Tensor | None) -> Tensor | None:
        return None if x is None else empty(x)

    assert call.origin is not None
    return replace(
        call, query=maybe(call.query), key=maybe(call.key), value=empty(call.value),
        output=empty(call.output), mask=Mask(), tokens=None, scores=maybe(call.scores),
        weights=maybe(call.weights), logits=maybe(call.logits),
        origin=replace(call.origin, tensor=empty(call.origin.tensor)),
    )  # fmt: skip


def _kv_heads(call: Call, marks: Marks) -> tuple[int, ...]:
    """The key head that each head reads. Where some have equal keys and values, the weights tell: a key head
    that is repeated is made by the same rows each time, twins are made by rows of their own.
    """
    equal = call.site.kv_heads  # as the numbers have it
    tensors = [x for x in (call.value, call.key) if x is not None and x.shape[1] == len(equal)]
    if len(set(equal)) == len(equal) or not tensors:
        return equal
    leaves = [marks.leaves(x) for x in tensors]

    def rows(heads: list[int]) -> tuple[frozenset[object], ...]:
        sources = (origins(x[:, heads], [1], behind) for x, behind in zip(tensors, leaves, strict=True))
        return tuple(frozenset() if source is None else source.rows for source in sources)

    if rows([equal.index(key_head) for key_head in set(equal)]) == rows(list(range(len(equal)))):
        return equal  # the others are made by no rows but these
    key_heads: dict[object, int] = {}
    return tuple(key_heads.setdefault(rows([head]), len(key_heads)) for head in range(len(equal)))


def _heads_of_values(call: Call, leaves: list[Leaf]) -> str:
    """Why the heads of queries that no weights made cannot be told, unless their values tell."""
    sources = origins(call.value, [0, 1], leaves) if call.value.shape[1] == call.output.shape[1] else None
    if call.output.shape[1] == 1 or (
        sources is not None and sources.axes[1].role == "h" and sources.axes[0].role == "b"
    ):
        return ""
    return NOTHING_TELLS


def _judge(record: ProbedCall, axes: list[int], proved: list[Axis], value_leaves: list[Leaf]) -> None:
    """Compare what custom says of the axes of the queries with what the weights show."""
    origin, call = record.origin, record.call
    sizes = [origin.tensor.shape[axis] for axis in axes]
    roles = [origin.roles[axis] for axis in axes]
    heads = origin.heads if origin.heads > 1 else call.output.shape[1]  # or the model unfolds them later
    fits = [
        agree("b" if role == "q" else role, heads, axis, size)
        for role, axis, size in zip(roles, proved, sizes, strict=True)
    ]
    query = roles.index("q")
    if proved[query].joint and any(axis.role in "hnm" and not axis.joint for axis in proved):
        fits[query] = True  # tokens of two kinds, each with weights of its own
    if all(fits):
        return
    shared = all(
        fit or (role in ("h", "g") and axis.role == "b")
        for fit, role, axis in zip(fits, roles, proved, strict=True)
    )
    if shared and not _heads_of_values(call, value_leaves):
        return  # heads that share their queries and differ in what they read
    if proved[query].role == "h" and sizes[query] > 1:  # heads were taken for queries
        other = [i for i, role in enumerate(roles) if role in ("h", "g") and proved[i].role == "b"]
        if len(other) == 1:
            query = other[0]
    named = roles_from([axis for i, axis in enumerate(proved) if i != query])
    if named is None or (proved[query].role != "b" and sizes[query] > 1):
        record.problem = "its heads could not be told apart by the weights behind its queries"
        return
    new = [*named[:query], "q", *named[query:]]
    result = list(origin.result)
    for axis, role in zip(axes, new, strict=True):
        result[origin.axes[axis]] = role
    merged = next((axis.heads for axis in proved if axis.role in ("n", "m")), 1)
    record.wanted = tuple(result), merged


@torch.no_grad()
def _read(call: Call) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights times the values (batch, heads, queries, width), unless they are not to be compared; where
    some sequence and head has a weight (queries, keys); which rows have any (batch, heads, queries).
    """
    compared = not (call.again or call.partial or call.dropout or call.value.shape[2] != call.keys)
    heads, value = range(call.output.shape[1]), call.value.detach()
    products, reads, alive = [], [], []
    for piece in _pieces(call):
        weights = weight_rows(call, heads, piece)
        some = weights != 0
        reads.append(some.flatten(0, 1).any(0))
        alive.append(some.any(-1))
        if compared:
            values = value.to(weights.dtype).repeat_interleave(weights.shape[1] // value.shape[1], 1)
            products.append(weights @ values)
    return torch.cat(products, 2) if compared else None, torch.cat(reads), torch.cat(alive, 2)


def _pieces(call: Call) -> Iterator[range]:
    """Some queries after the other, so that their weights are not too many at once."""
    step = max(1, _PIECE // max(1, call.output.shape[0] * call.output.shape[1] * call.keys))
    yield from (
        range(start, min(call.queries, start + step)) for start in range(0, max(1, call.queries), step)
    )


def _is_formula(call: Call, products: Tensor | None, alive: Tensor) -> bool:
    """Whether the weights times the values are the output."""
    return products is None or is_output(products, call.output, alive)
