"""What the first run of a probe shows of one attention call: its heads, its keys, and whether its output is
what was taken for its weights and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyheads.capture.axes import Roles
from manyheads.capture.call import Call, Origin
from manyheads.capture.call_rows import weight_rows
from manyheads.capture.dependence import NO_WEIGHTS, Leaf, Marks, leaves_of
from manyheads.capture.head_axes import Axis, agree, keys_are_tokens, origins, roles_from
from manyheads.capture.mask_reading import shown

NOTHING_TELLS = "no weights are behind its queries, so that nothing tells its heads"


@dataclass(eq=False)
class Record:
    """What the first run shows of one attention call.

    rows, data: the weights and the tokens that its queries depend on.
    problem: why nothing is proved of it.
    wanted: what the axes of its product are and the heads in a merged one, where custom has it wrong.
    tokens: its keys are tokens.
    readers: for each product with weights that reads its output, whether it reads nothing else.
    """

    call: Call
    output: Tensor
    rows: frozenset[object] = frozenset()
    data: frozenset[object] = frozenset()
    problem: str = ""
    wanted: tuple[Roles, int] | None = None
    tokens: bool = True
    readers: list[bool] = field(default_factory=list)
    query: Tensor | None = None
    key: Tensor | None = None
    hidden: Tensor | None = None  # which scores are not those of a mask

    @property
    def origin(self) -> Origin:
        """How the call was made."""
        assert self.call.origin is not None
        return self.call.origin


def record_call(call: Call, marks: Marks) -> Record:
    """Look at one call: differentiate its queries and values, and compute its output again."""
    record = Record(call, marks.output(call.output))
    record.query = None if call.query is None else call.query.detach().clone()
    record.key = None if call.key is None else call.key.detach().clone()
    record.hidden = None if call.scores is None else shown(call.scores.detach())
    if call.again:
        return record
    origin = record.origin
    value_leaves = _leaves(call.value, marks)
    record.tokens = call.partial or keys_are_tokens(call.value, value_leaves)
    if not record.tokens:
        return record
    axes = [axis for axis, role in enumerate(origin.roles) if role not in ("k", "d")]
    leaves = _leaves(origin.tensor, marks)
    sources = origins(origin.tensor, axes, leaves)
    if sources is None:
        record.problem = _heads_of_values(call, value_leaves)
    else:
        record.rows, record.data = sources.rows, sources.data
        _judge(record, axes, sources.axes, value_leaves)
        if record.wanted and all(leaf.weights == NO_WEIGHTS for leaf in leaves):
            record.wanted, record.problem = None, NOTHING_TELLS
    if not (record.problem or record.wanted or _is_formula(call)):
        record.problem = "what was taken for its weights and values does not give its output"
    return record


def _leaves(tensor: Tensor, marks: Marks) -> list[Leaf]:
    return [marks.leaves[id(leaf)] for leaf in leaves_of(tensor) if id(leaf) in marks.leaves]


def _heads_of_values(call: Call, leaves: list[Leaf]) -> str:
    """Why the heads of queries that no weights made cannot be told, unless their values tell."""
    sources = origins(call.value, [0, 1], leaves) if call.value.shape[1] == call.output.shape[1] else None
    if call.output.shape[1] == 1 or (
        sources is not None and sources.axes[1].role == "h" and sources.axes[0].role == "b"
    ):
        return ""
    return NOTHING_TELLS


def _judge(record: Record, axes: list[int], proved: list[Axis], value_leaves: list[Leaf]) -> None:
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


def _is_formula(call: Call) -> bool:
    """Whether the weights times the values are the output."""
    if call.partial or call.dropout or call.value.shape[2] != call.keys:
        return True
    weights = weight_rows(call, list(range(call.output.shape[1])), list(range(call.queries)))
    value = call.value.detach().to(weights.dtype)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    wanted, output = weights @ value, call.output.detach().to(weights.dtype)
    there = torch.isfinite(output).all(-1) & (weights != 0).any(-1)
    slack = 1e-3 if torch.finfo(call.output.dtype).eps < 1e-5 else 5e-2
    size = float(output[there].abs().max()) if bool(there.any()) else 0.0
    return bool(torch.allclose(wanted[there], output[there], rtol=slack, atol=slack * max(size, 1e-6)))
