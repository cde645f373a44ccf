"""Attention along a sequence: how much every head attends to each position, over one sequence or many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.call_rows import weight_rows
from manyheads.capture.interceptor import Interceptor
from manyheads.common.preserved_state import untouched
from manyheads.common.run_batch import run
from manyheads.common.types import Batch


@dataclass(frozen=True, eq=False)
class Along:
    """How much heads attend to each position.

    Attributes
    ----------
    heads: their names, layer.head, in the order of the model.
    weights: (heads, positions), each row the mean attention on every position: it sums to one.
    """

    heads: list[str]
    weights: Tensor


def along(model: nn.Module, batches: Iterable[Batch], query: int | None = None) -> Along:
    """The mean attention of every self-attention head on each position of sequences of one length.

    Parameters
    ----------
    model: any torch.nn.Module; run as it is, without gradients.
    batches: dicts, tuples or tensors; all sequences as long as each other, without padding.
    query: the position of the query, such as 0 for a class token; the mean over all queries without it.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(12, heads=3, layers=2, vocabulary=7)
    >>> attention = along(model, [torch.randint(7, (5, 11))], query=0)
    >>> attention.heads[:4], attention.weights.shape
    (['0.0', '0.1', '0.2', '1.0'], torch.Size([6, 11]))
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def on_call(call: Call) -> None:
        if call.site.cross:
            return
        with torch._C.DisableTorchFunction():
            positions = list(range(call.queries)) if query is None else [query % call.queries]
            rows = (
                weight_rows(call, list(range(call.site.heads)), positions).double().mean(2)
            )  # (batch, heads, keys)
            name, before = call.site.name, sums.get(call.site.name)
            if before is not None and before.shape[1] != rows.shape[2]:
                raise ValueError(
                    f"batches: sequences of {before.shape[1]} and of {rows.shape[2]} tokens; "
                    "expected one length"
                )
            sums[name] = rows.sum(0) if before is None else before + rows.sum(0)
            counts[name] = counts.get(name, 0) + len(rows)

    with untouched(model), torch.no_grad(), Interceptor(model, on_call):
        for batch in batches:
            run(model, batch)
    if not sums:
        raise ValueError("batches: no self-attention was seen; expected a transformer and at least one batch")
    names = [f"{layer}.{head}" for layer, total in enumerate(sums.values()) for head in range(len(total))]
    weights = torch.cat([total / counts[name] for name, total in sums.items()])
    return Along(names, weights.float().cpu())
