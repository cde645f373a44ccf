"""Whether a share of heads can be kept at all: asked before heads are ranked, which takes minutes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyheads.capture.interceptor import Interceptor
from manyheads.common.compare_outputs import seeded_evaluation
from manyheads.common.labelled_batch import without_labels
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import rows_of
from manyheads.surgery.plan import plan


def check_plan(model: nn.Module, batch: Batch, keep: float, **options: Any) -> None:
    """Raise what `plan` would raise for this model after ranking, whatever the ranking; options as for it.

    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(d_model=12, heads=6, kv_heads=2, layers=1, vocabulary=17)
    >>> check_plan(model, torch.ones(1, 5, dtype=torch.int64), 0.5, groups=True)
    >>> check_plan(model, torch.ones(1, 5, dtype=torch.int64), 0.9, groups=True)
    Traceback (most recent call last):
    ValueError: keep: 0.9 removes no head ...
    """
    with torch.no_grad(), seeded_evaluation(model), Interceptor(model, lambda call: None) as interceptor:
        run(model, without_labels(batch))
    rows = rows_of(model, list(interceptor.sites.by_name.values()))
    count = len(rows)
    ranking = {"importance": torch.ones(3, count, dtype=torch.float64)}
    plan(HeadTable(rows, torch.ones(count), ranking), keep, **options)
