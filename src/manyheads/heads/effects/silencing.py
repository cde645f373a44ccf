"""What changes in an input's output when each head is silenced, one after the other, many in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.effects.answer_items import Item
from manyheads.heads.effects.questions import Question
from manyheads.heads.model_outputs import output_distance, read_output
from manyheads.heads.silence import gates
from manyheads.heads.table import Row

# Tokens that run through the model at once.
TOGETHER = 512


class Silenced(TypedDict):
    """What changes without each head: None for heads that were not silenced, or models that say nothing.

    ``measure`` says what the change is, and its unit.
    """

    measure: str
    change: list[float | None]
    answer: list[list[Item] | None] | None


def silenced(
    model: nn.Module,
    batch: Batch,
    rows: Sequence[Row],
    *,
    question: Question | None = None,
    length: int = 1,
    order: Sequence[int] | None = None,
    progress: Progress = no_progress,
) -> Silenced:
    """How far the output moves from the full model's, and what the model says, without each head.

    Parameters
    ----------
    model: any torch.nn.Module, in eval mode.
    batch: one sequence.
    rows: the heads.
    question: what to ask the model each time.
    length: how many tokens the sequence has, to know how many copies of it run at once.
    order: which of the heads, in this order; all of them without it. The others are None in the result.
    progress: called with how many heads were silenced.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17).eval()
    >>> rows = [Row("blocks.0.attention", 0, head, head, head, "self") for head in range(2)]
    >>> found = silenced(model, torch.randint(17, (1, 5)), rows)
    >>> len(found["change"]), min(found["change"]) > 0, found["answer"]
    (2, True, None)
    """
    question_batch = batch if question is None else question.batch
    change: list[float | None] = [None] * len(rows)
    answers: list[list[Item] | None] = [None] * len(rows)
    order = range(len(rows)) if order is None else order
    sizes: dict[str, int] = {}
    chosen = {rows[number].site for number in order}
    for row in (row for row in rows if row.site in chosen):
        sizes[row.site] = max(sizes.get(row.site, 0), row.head + 1)
    done = 0
    with torch.no_grad():
        full = read_output(run(model, question_batch), model)
        for numbers, result in _runs(model, question_batch, rows, sizes, order, length):
            values = read_output(result, model)
            for sequence, number in enumerate(numbers):
                silenced_output = type(values)(values.value[sequence : sequence + 1], full.real)
                change[number] = round(output_distance(full, silenced_output).item(), 9)
                if question is not None:
                    answers[number] = question.answer(result, sequence)
            done += len(numbers)
            progress("silence", done, len(order))
    return {"measure": full.measure, "change": change, "answer": None if question is None else answers}


def _runs(
    model: nn.Module,
    batch: Batch,
    rows: Sequence[Row],
    sizes: Mapping[str, int],
    order: Sequence[int],
    length: int,
) -> Iterator[tuple[list[int], object]]:
    """Which heads were silenced, one in each sequence, and what the model returned."""
    at_once = max(1, TOGETHER // max(1, length))
    if at_once > 1 and not _copies(model, batch, sizes):
        at_once = 1
    device = device_of(model)
    for start in range(0, len(order), at_once):
        numbers = list(order[start : start + at_once])
        values = {}
        for row in (rows[number] for number in numbers):
            values[row.site] = torch.ones(len(numbers), sizes[row.site], device=device)
        for n, number in enumerate(numbers):
            values[rows[number].site][n, rows[number].head] = 0.0
        if at_once == 1:
            values = {site: value[0] for site, value in values.items()}
        with gates(model, values):
            yield numbers, run(model, repeat_batch(batch, len(numbers)))


def _copies(model: nn.Module, batch: Batch, sizes: Mapping[str, int]) -> bool:
    """Whether copies of an input in one batch, each with its own gates, give the same output as alone."""
    try:
        single = read_output(run(model, batch), model).value
        ones = {site: torch.ones(2, size, device=single.device) for site, size in sizes.items()}
        with gates(model, ones):
            double = read_output(run(model, repeat_batch(batch, 2)), model).value
    except Exception:  # whatever it is, this model takes one sequence at a time
        return False
    within = 1e-3 * float(single.abs().amax())
    return double.shape[0] == 2 and torch.allclose(double, single.expand_as(double), rtol=1e-3, atol=within)


def repeat_batch(batch: Batch, number: int) -> Batch:
    """A batch of several copies of one sequence.

    >>> repeat_batch({"ids": torch.ones(1, 3), "scale": 2}, 5)["ids"].shape
    torch.Size([5, 3])
    """

    def copies(x: Tensor) -> Tensor:
        return x.expand(number, *x.shape[1:]) if x.dim() and len(x) == 1 else x

    repeated: Batch = map_tensors(copies, batch)
    return repeated
