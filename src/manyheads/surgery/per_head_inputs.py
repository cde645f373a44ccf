"""Which arguments of a module hold something for every head, found by differentiating each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.call_rows import differentiable_output
from manyheads.capture.interceptor import Interceptor
from manyheads.models.per_head_inputs import Input, Pick, arguments, hooks
from manyheads.nn.mask import Mask


def inputs_of_heads(
    module: nn.Module, heads: int, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[Input]:
    """The arguments of a module that hold something for every head, found by differentiating each head.

    heads: that the attention in the module has.
    """
    picked = hooks(module)
    leaves: dict[str | int, Tensor] = {}
    for argument, value in arguments(args, kwargs):
        entries = picked[argument].heads if argument in picked else heads
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() > 1
            and any(size % entries == 0 for size in value.shape)
        ):
            leaves[argument] = value.detach().clone().requires_grad_(True)
    inputs = [
        Input(argument, 0, value.slopes.shape[0], _entries(value.slopes.shape[0], picked.get(argument)))
        for argument, value in arguments(args, kwargs)
        if isinstance(value, Mask) and value.slopes is not None
    ]
    if not leaves:
        return inputs
    args = tuple(leaves.get(index, value) for index, value in enumerate(args))
    kwargs = {name: leaves.get(name, value) for name, value in kwargs.items()}
    touched: dict[str | int, list[Tensor]] = {}

    def on_call(call: Call) -> None:
        with torch._C.DisableTorchFunction():
            output = differentiable_output(call)
            for head in range(call.site.heads):
                _touch(call, output, head, leaves, touched)

    with torch.enable_grad(), Interceptor(module, on_call):
        module(*args, **kwargs)
    for argument, axes in touched.items():
        entries = picked[argument].heads if argument in picked else heads
        for axis, rows in enumerate(axes):
            entry_of_head = _of_heads(rows, entries, shared=argument in picked)
            if entry_of_head is not None:
                inputs.append(Input(argument, axis, entries, entry_of_head))
                break
    return inputs


def _touch(
    call: Call,
    output: Tensor,
    head: int,
    leaves: dict[str | int, Tensor],
    touched: dict[str | int, list[Tensor]],
) -> None:
    """Record which entries of each argument one head depends on."""
    biases = [mask for mask in call.mask.tensors if mask.requires_grad and mask.dim() == 4]
    for tensor in (call.scores, output, *biases):
        if tensor is None or not tensor.requires_grad or tensor.shape[1] != call.site.heads:
            continue
        part = tensor[:, head]
        part = part.masked_fill(part.isinf(), 0.0)
        wave = (
            torch.arange(part.numel(), device=part.device, dtype=torch.float64).square().cos().to(part.dtype)
        )
        total = (part * wave.view(part.shape)).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
        for argument, gradient in zip(leaves, gradients, strict=True):
            if isinstance(gradient, Tensor):
                marks = gradient != 0
                axes = touched.setdefault(
                    argument,
                    [torch.zeros(call.site.heads, size, dtype=torch.bool) for size in marks.shape],
                )
                for axis, rows in enumerate(axes):
                    others = [other for other in range(marks.dim()) if other != axis]
                    rows[head] |= marks.any(others).cpu()


def _entries(size: int, picked: Pick | None) -> tuple[int | None, ...]:
    """The entry of each head, where a changed model picks some already."""
    return tuple(range(size) if picked is None or picked.keep is None else picked.keep)


def _of_heads(rows: Tensor, entries: int, shared: bool) -> tuple[int | None, ...] | None:
    """The entry that each head depends on, given the rows (heads, size); None unless it is at most one.

    shared: whether heads may share an entry, as copies of a head do.
    """
    if rows.shape[1] % entries or bool((rows == rows[:1]).all()):
        return None
    folded = rows.view(len(rows), -1, entries).any(1)  # (heads, entries)
    if bool((folded.sum(1) > 1).any()) or (not shared and bool((folded.sum(0) > 1).any())):
        return None
    return tuple(int(row.nonzero()[0, 0]) if bool(row.any()) else None for row in folded)
