"""Second moments of what linear layers read, on batches of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from manyheads.capture.weights import ROLES, Projections
from manyheads.common.devices import batches_to_device, device_of
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.common.types import Batch


def input_moments(
    model: nn.Module, batches: Iterable[Batch], by_site: Mapping[str, Projections]
) -> dict[str, Tensor]:
    """The mean of x x' over all tokens, padding included, where x is what a linear layer reads and a one.

    Returns
    -------
    ``{path of the layer: (inputs + 1, inputs + 1)}`` in float64, for linear layers that make the queries,
    keys or values of heads.
    """
    paths = {
        part.parameter.rpartition(".")[0]
        for of_site in by_site.values()
        for head in of_site.heads
        for role in ROLES[:3]
        for part in getattr(head, role)
    }
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    last: list[tuple[Tensor, Tensor]] = []  # q, k and v mostly read the same

    def hook(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not last or last[0][0] is not args[0]:
                rows = args[0].detach().flatten(0, -2).double()
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
                last[:] = [(args[0], rows.T @ rows)]
            sums[path] = sums[path] + last[0][1] if path in sums else last[0][1].clone()
            counts[path] = counts.get(path, 0) + args[0].shape[:-1].numel()

        return note

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for path, module in model.named_modules():
            if path in paths and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
                stack.callback(module.register_forward_pre_hook(hook(path)).remove)
        with torch.no_grad():
            for batch in batches_to_device(batches, device_of(model)):
                run(model, batch)
                last.clear()
    return {path: total / counts[path] for path, total in sums.items()}
