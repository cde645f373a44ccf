"""Rows of a call: the exact weights and scores of some of its heads and queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.capture.call import Call
from manyheads.nn.mask import Mask


def weight_rows(call: Call, numbers: Sequence[int], queries: Sequence[int]) -> Tensor:
    """Rows of the softmax (batch, heads, rows, keys), in float32 at least. Queries without any key have
    zeros. Heads or rows that are a range are not copied.
    """
    exact = torch.promote_types(call.output.dtype, torch.float32)
    if call.weights is not None:
        return call.weights[:, _index(numbers)][:, :, _index(queries)].to(exact)
    left = call.sinks[0]
    return score_rows(call, numbers, queries).softmax(-1).nan_to_num(0.0)[..., left : left + call.keys]


def score_rows(call: Call, numbers: Sequence[int], queries: Sequence[int]) -> Tensor:
    """Rows of the scores (batch, heads, rows, keys and sinks) with masks and biases added, in float32 at
    least."""
    exact = torch.promote_types(call.output.dtype, torch.float32)
    if call.scores is not None:
        return call.scores[:, _index(numbers)][:, :, _index(queries)].to(exact)
    if call.query is None or call.key is None:
        raise ValueError(f"{call.site.name}: a call with neither scores nor queries and keys")
    group = call.query.shape[1] // call.key.shape[1]
    q = call.query[:, _index(numbers)][:, :, _index(queries)].to(exact)
    k = call.key[:, [number // group for number in numbers]].to(exact)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    return _add_mask(scores, call, numbers, queries)


def _index(numbers: Sequence[int]) -> slice | list[int]:
    """Numbers to index an axis by: a range without holes as a slice, which gives a view."""
    if isinstance(numbers, range) and numbers.step == 1:
        return slice(numbers.start, numbers.stop)
    return list(numbers)


def _add_mask(scores: Tensor, call: Call, numbers: Sequence[int], queries: Sequence[int]) -> Tensor:
    mask: Mask = call.mask
    first, last = min(queries), max(queries) + 1
    rows = [i - first for i in queries]
    allowed, bias = mask.rectangle(
        range(first, last), range(call.keys), call.keys - call.queries, scores.device
    )
    if bias is not None:
        scores = scores + _select(bias, numbers, rows)
    return scores if allowed is None else scores.masked_fill(~_select(allowed, numbers, rows), -torch.inf)


def _select(part: Tensor, numbers: Sequence[int], rows: list[int]) -> Tensor:
    part = part[(None,) * (4 - part.dim())]
    part = part if part.shape[1] == 1 else part[:, _index(numbers)]
    return part if part.shape[2] == 1 else part[:, :, rows]


def differentiable_output(call: Call) -> Tensor:
    """The output of a call, (batch, heads, queries, d_value). That of an opaque kernel, which may have no
    gradient, is computed again, with all weights at once.
    """
    if not call.opaque or not call.output.requires_grad:
        return call.output
    weights = weight_rows(call, range(call.output.shape[1]), range(call.queries))
    value = call.value.to(weights.dtype).repeat_interleave(weights.shape[1] // call.value.shape[1], 1)
    return (weights @ value).to(call.output.dtype)


def is_fine(x: Tensor) -> bool:
    """Whether numbers are exact enough to refute anything by."""
    return torch.finfo(x.dtype).eps < 1e-5


def is_output(products: Tensor, output: Tensor, alive: Tensor) -> bool:
    """Whether weights times values (batch, heads, queries, width) are the output, at queries that attend to
    anything (batch, heads, queries).
    """
    slack = 1e-3 if is_fine(output) else 5e-2
    output = output.detach().to(products.dtype)
    valid = torch.isfinite(output).all(-1) & alive
    size = float(output[valid].abs().max()) if bool(valid.any()) else 0.0
    return bool(torch.allclose(products[valid], output[valid], rtol=slack, atol=slack * max(size, 1e-6)))
