"""What a refit keeps in memory, and how much text it may therefore read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from manyheads.common.devices import device_of, to_device
from manyheads.common.memory_budget import in_units, memory_budget
from manyheads.common.types import Batch
from manyheads.heads.observer import tensors
from manyheads.surgery.paused_passes import Stop, passes

_MODELS = 2  # the cut one, which is no larger, and the uncut one
_SPARE = 1.75  # what else the frames of a paused pass hold, and what the allocator keeps: measured on MiniLM


class RefitMemory(NamedTuple):
    """Bytes that a refit keeps.

    batch: for the batch that was tried, in both models.
    fixed: for the normal equations of the widest layer, and for one batch in float64.
    """

    batch: float
    fixed: float


def refit_memory(model: nn.Module, batch: Batch, writers: Sequence[str] | None = None) -> RefitMemory:
    """What a refit on this batch keeps: one pass of the uncut model, which stops at every layer.

    ``writers`` are the layers, where they are known.

    >>> from manyheads.nn.transformers import Encoder
    >>> import torch
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17).eval()
    >>> few, many = (refit_memory(model, torch.ones(size, 11, dtype=torch.long)) for size in (2, 4))
    >>> many.batch / few.batch
    2.0
    """
    batch = to_device(batch, device_of(model))
    held = rows = equations = 0.0
    with passes(model, [batch], writers) as (only,):
        while (stop := only.advance()) is not None:
            width, d_model = _widths(stop)
            tokens = stop.stream.numel() / d_model
            held = max(held, _bytes(stop))
            rows = max(rows, 8.0 * tokens * (3 * width + 6 * d_model))
            equations = max(equations, 8.0 * (6 * width**2 + 4 * width * d_model))
    return RefitMemory(_SPARE * _MODELS * held, equations + rows)


def tokens_within(model: nn.Module, batch: Batch, tokens: int, memory: str | int | None) -> int:
    """How many tokens a refit may read; ``batch`` is a batch of them, of this many tokens."""
    budget = memory_budget(memory, device_of(model))
    needs = _checked(model, batch, budget)
    return int((budget - needs.fixed) / max(needs.batch, 1) * tokens)


def batches_within(
    model: nn.Module, batches: list[Batch], writers: Sequence[str], memory: str | int | None
) -> tuple[list[Batch], str]:
    """The batches, or as many of them as a refit may read, at equal distances, and a note that says so."""
    budget = memory_budget(memory, device_of(model))
    sizes = [sum(x.numel() for x in tensors(batch).values()) for batch in batches]
    largest = max(range(len(batches)), key=sizes.__getitem__)
    needs = _checked(model, batches[largest], budget, writers)
    if not needs.batch:
        return batches, ""
    room = (budget - needs.fixed) / needs.batch * sizes[largest]
    count = len(batches)
    chosen = list(range(count))
    while sum(sizes[n] for n in chosen) > room:
        count -= 1
        chosen = [n * len(batches) // count for n in range(count)]
    if count == len(batches):
        return batches, ""
    note = f"{count} of {len(batches)} batches, to keep within {in_units(budget)} of memory"
    return [batches[n] for n in chosen], note


def _checked(
    model: nn.Module, batch: Batch, budget: int, writers: Sequence[str] | None = None
) -> RefitMemory:
    needs = refit_memory(model, batch, writers)
    if needs.fixed + needs.batch > budget:
        raise ValueError(
            f"memory: got {in_units(budget)}, and a refit needs {in_units(needs.fixed + needs.batch)} for "
            "one layer and one batch; give more, take smaller batches, or leave the refit out"
        )
    return needs


def _widths(stop: Stop) -> tuple[int, int]:
    """The inputs of a layer, and a one for its bias; the width of the stream."""
    read = stop.stream if stop.read is None else stop.read
    return read.shape[-1] + 1, stop.stream.shape[-1]


def _bytes(stop: Stop) -> float:
    """What a pass holds that waits here: what the layer reads and writes, the stream twice, and a mask."""
    held: list[Tensor] = [stop.written, stop.stream, stop.stream]
    held += [] if stop.read is None else [stop.read]
    mask = 0 if stop.real is None else stop.real.numel() * stop.real.shape[-1]
    return float(mask + sum(x.numel() * x.element_size() for x in held))
