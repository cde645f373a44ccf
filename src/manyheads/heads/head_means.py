"""The mean output of every head: what mean ablation puts in its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.labelled_batch import without_labels
from manyheads.common.preserved_state import evaluating
from manyheads.common.types import Batch
from manyheads.heads.diversity.collect import Collector
from manyheads.heads.observer import moved


def head_means(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The output of each head, the mean over all queries that count (not padding): {site: (heads, width)}.

    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> {site: mean.shape for site, mean in head_means(layer, [(x, x, x)]).items()}
    {'': torch.Size([2, 3])}
    """
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    with (
        evaluating(model),
        torch.no_grad(),
        Collector(model, rows=0, outputs=True, gates=False, seed=0) as collector,
    ):
        for batch in moved(batches, device_of(model)):
            for record in collector.run(without_labels(batch))[0]:
                if record.outputs is None:
                    continue
                name, total = record.site.name, record.outputs.double().sum(0)
                totals[name] = totals[name] + total if name in totals else total
                counts[name] = counts.get(name, 0) + record.tokens
    return {name: total / max(counts[name], 1) for name, total in totals.items()}
