"""The mean output of every head: what mean ablation puts in its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible, without_dead_rows
from manyheads.common.devices import batches_to_device, device_of, for_float64
from manyheads.common.labelled_batch import without_labels
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.observer import failed_on


def head_means(model: nn.Module, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The output of each head, the mean over all queries that count (not padding): {site: (heads, width)}.

    Sites of which a call shows only some heads are left out.

    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> {site: mean.shape for site, mean in head_means(layer, [(x, x, x)]).items()}
    {'': torch.Size([2, 3])}
    """
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def on_call(call: Call) -> None:
        if call.again or call.partial:
            return
        with torch._C.DisableTorchFunction():
            call = without_dead_rows(call)
            real = update_site(call, visible(call))  # (batch or 1, queries), False for padding
            outputs = call.output.transpose(1, 2)  # (batch, queries, heads, width)
            outputs = outputs.flatten(0, 1) if real is None else outputs[real.expand(len(outputs), -1)]
            name = call.site.name
            total = outputs.to(for_float64(outputs.device)).sum(0, dtype=torch.float64)
            totals[name] = totals[name] + total if name in totals else total
            counts[name] = counts.get(name, 0) + len(outputs)

    with evaluating(model), torch.no_grad(), Interceptor(model, on_call):
        for batch in batches_to_device(batches, device_of(model)):
            try:
                run(model, without_labels(batch))
            except Exception as error:
                raise failed_on(batch, error) from error
    return {name: total / max(counts[name], 1) for name, total in totals.items()}
