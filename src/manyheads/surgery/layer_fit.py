"""fit_layers: the attention of each layer, alone, learns to give what it gave in another model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from manyheads.capture.weights import ROLES, Projections
from manyheads.common.compare_outputs import Captured, tensors
from manyheads.common.devices import batches_to_device, device_of
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.models.changes import get_tensor
from manyheads.surgery.regions import regions_of
from manyheads.surgery.verify import capture, compared_output

_HELD_OUT = 5  # every fifth batch
_RATE = 0.01  # of the size of a weight, the highest learning rate
_AT_ONCE = 4  # layers whose inputs and outputs are in memory together


def fit_layers(
    small: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    by_site: Mapping[str, Projections],
    *,
    steps: int = 60,
    progress: Progress = no_progress,
) -> dict[str, tuple[float, float]]:
    """Let the weights of heads learn, module by module and in place, what these modules gave in a teacher.

    Each module gets the inputs that it has in the teacher, and Adam lowers its squared error, one batch a
    step; every fifth batch is held out, and weights that do no better there are put back.

    Parameters
    ----------
    small, teacher: models with the same modules; ``small`` is changed.
    by_site: which weights the heads of ``small`` have; names are enough, shapes may differ.
    steps: for each module.

    Returns
    -------
    ``{module path: (error before, after)}``, as shares of the variance of its output on held-out batches.
    """
    calibration = list(batches_to_device(batches, device_of(small)))
    paths = list(regions_of(by_site))
    errors: dict[str, tuple[float, float]] = {}
    for start in range(0, len(paths), _AT_ONCE):
        chunk = paths[start : start + _AT_ONCE]
        calls: dict[str, list[list[Captured]]] = {path: [] for path in chunk}
        for batch in calibration:
            for path, captured in capture(teacher, batch, {}, chunk)[0].items():
                calls[path].append(captured)
        for path in chunk:
            names = _names(by_site, path, small)
            errors[path] = _fit(small, path, names, calls.pop(path), steps)
            progress("fit", len(errors), len(paths))
    return errors


def _names(by_site: Mapping[str, Projections], path: str, model: nn.Module) -> list[str]:
    """The parameters of the heads in a module."""
    names = {
        part.parameter
        for of_site in by_site.values()
        for head in of_site.heads
        for role in ROLES
        for part in (*getattr(head, role), *head.biases.get(role, ()))
        if not path or part.parameter.startswith(f"{path}.")
    }
    parameters = dict(model.named_parameters())
    return sorted(name for name in names if name in parameters)


def _fit(
    model: nn.Module, path: str, names: list[str], calls: Sequence[list[Captured]], steps: int
) -> tuple[float, float]:
    module = model.get_submodule(path)
    learned = [get_tensor(model, name) for name in names]
    held = list(calls[_HELD_OUT - 1 :: _HELD_OUT]) or list(calls)
    fitted = [each for number, each in enumerate(calls) if number % _HELD_OUT != _HELD_OUT - 1]
    before = [parameter.detach().clone() for parameter in learned]
    with evaluating(module):
        for frozen in module.parameters():
            frozen.requires_grad_(False)
        for parameter in learned:
            parameter.requires_grad_(True)
        first = _error(module, held)
        rates = [_RATE * float(p.detach().square().mean().sqrt().clamp(min=1e-3)) for p in learned]
        optimizer = torch.optim.Adam(
            [{"params": [p], "lr": rate} for p, rate in zip(learned, rates, strict=True)], betas=(0.9, 0.99)
        )
        for step in range(steps):
            warm = min(1.0, (step + 1) / max(1, steps // 10))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                loss = _apart(module, fitted[step % len(fitted)])
            loss.backward()
            optimizer.step()
        last = _error(module, held)
        if not last < first:
            with torch.no_grad():
                for parameter, old in zip(learned, before, strict=True):
                    parameter.copy_(old)
            last = first
        for parameter in learned:
            parameter.grad = None
    return first, last


def _error(module: nn.Module, calls: Sequence[list[Captured]]) -> float:
    with torch.no_grad():
        return sum(float(_apart(module, each)) for each in calls) / len(calls)


def _apart(module: nn.Module, calls: list[Captured]) -> Tensor:
    """The squared error of a module's output, as a share of the variance of the right one."""
    total = torch.zeros(())
    for call in calls:
        args, kwargs = call.arguments()
        output = compared_output(module, module(*args, **kwargs))
        (_, target), (_, actual) = next(tensors(compared_output(module, call.output))), next(tensors(output))
        spread = (target - target.flatten(0, -2).mean(0)).square().sum().clamp(min=1e-12)
        total = total.to(target.device) + (target - actual).square().sum() / spread
    return total / len(calls)
