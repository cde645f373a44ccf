"""What changes in an input's output when each head is silenced, one after the other, many in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run
from manyheads.heads.effects.questions import Question
from manyheads.heads.model_outputs import difference, read
from manyheads.heads.silence import gates
from manyheads.heads.table import Row

# Tokens that run through the model at once.
TOGETHER = 512


def silenced(
    model: nn.Module,
    batch: Any,
    rows: Sequence[Row],
    *,
    question: Question | None = None,
    length: int = 1,
    order: Sequence[int] | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """How far the output goes from the full model's, and what the model says, without each head.

    Parameters
    ----------
    model: any torch.nn.Module, in eval mode.
    batch: one sequence.
    rows: the heads.
    question: what the model is asked.
    length: how many tokens the sequence has, to know how many copies of it run at once.
    order: which of the heads, the first first; all of them without it. Others stay unknown.
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
    asked = batch if question is None else question.batch
    change: list[float | None] = [None] * len(rows)
    answers: list[list[list[Any]] | None] = [None] * len(rows)
    order = range(len(rows)) if order is None else order
    sizes: dict[str, int] = {}
    chosen = {rows[number].site for number in order}
    for row in (row for row in rows if row.site in chosen):
        sizes[row.site] = max(sizes.get(row.site, 0), row.head + 1)
    done = 0
    with torch.no_grad():
        full = read(run(model, asked), model)
        for numbers, result in _runs(model, asked, rows, sizes, order, length):
            values = read(result, model)
            for place, number in enumerate(numbers):
                one = type(values)(values.value[place : place + 1], full.real)
                change[number] = round(difference(full, one).item(), 9)
                if question is not None:
                    answers[number] = question.answer(result, place)
            done += len(numbers)
            progress("silence", done, len(order))
    return {"change": change, "answer": None if question is None else answers}


def _runs(
    model: nn.Module,
    batch: Any,
    rows: Sequence[Row],
    sizes: Mapping[str, int],
    order: Sequence[int],
    length: int,
) -> Iterator[tuple[list[int], Any]]:
    """Which heads were silenced, one in each sequence, and what the model returned."""
    together = max(1, TOGETHER // max(1, length))
    if together > 1 and not _copies(model, batch, sizes):
        together = 1
    place = device_of(model)
    for start in range(0, len(order), together):
        numbers = list(order[start : start + together])
        values = {}
        for row in (rows[number] for number in numbers):
            values[row.site] = torch.ones(len(numbers), sizes[row.site], device=place)
        for n, number in enumerate(numbers):
            values[rows[number].site][n, rows[number].head] = 0.0
        if together == 1:
            values = {site: value[0] for site, value in values.items()}
        with gates(model, values):
            yield numbers, run(model, repeated(batch, len(numbers)))


def _copies(model: nn.Module, batch: Any, sizes: Mapping[str, int]) -> bool:
    """Whether copies of an input in one batch, each with gates of its own, give what it gives alone."""
    try:
        alone = read(run(model, batch), model).value
        ones = {site: torch.ones(2, size, device=alone.device) for site, size in sizes.items()}
        with gates(model, ones):
            both = read(run(model, repeated(batch, 2)), model).value
    except Exception:  # whatever it is, this model takes one sequence at a time
        return False
    within = 1e-3 * float(alone.abs().amax())
    return both.shape[0] == 2 and torch.allclose(both, alone.expand_as(both), rtol=1e-3, atol=within)


def repeated(batch: Any, number: int) -> Any:
    """A batch of so many copies of one sequence.

    >>> repeated({"ids": torch.ones(1, 3), "scale": 2}, 5)["ids"].shape
    torch.Size([5, 3])
    """
    if isinstance(batch, Tensor):
        return batch.expand(number, *batch.shape[1:]) if batch.dim() and len(batch) == 1 else batch
    if isinstance(batch, Mapping):
        return {name: repeated(item, number) for name, item in batch.items()}
    return tuple(repeated(item, number) for item in batch) if isinstance(batch, tuple | list) else batch
