"""Modules that are given something for every head, such as ALiBi: they get it for the heads they kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.heads.calls import Call
from manyheads.heads.intercept import Interceptor
from manyheads.nn.mask import Mask


class Input(NamedTuple):
    """An argument that holds something for every head, along ``axis``: entry i is for head
    ``of[i % len(of)]``, and for none that is there any more where that is None.
    """

    argument: str | int
    axis: int
    of: tuple[int | None, ...]

    def keep(self, removed: Sequence[int]) -> list[int]:
        """The entries of one batch element that stay when these heads go."""
        return [place for place, head in enumerate(self.of) if head is not None and head not in removed]


class Narrow:
    """A forward pre-hook that picks the kept heads out of one argument.

    Parameters
    ----------
    argument: the name of a keyword argument, or the number of a positional one.
    axis: of the heads in it.
    heads: how many there are on that axis; a multiple of them is batch * heads.
    keep: the numbers of those that stay; None sets the argument to None.

    Examples
    --------
    >>> layer = nn.Identity()
    >>> Narrow(argument=0, axis=1, heads=3, keep=[0, 2]).attach(layer)
    >>> layer(torch.arange(6).view(2, 3))
    tensor([[0, 2],
            [3, 5]])
    """

    def __init__(self, argument: str | int, axis: int, heads: int, keep: Sequence[int] | None) -> None:
        self.argument, self.axis, self.heads = argument, axis, heads
        self.keep = None if keep is None else list(keep)

    def attach(self, module: nn.Module) -> None:
        """Put it on a module, in the place of one for the same argument."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Narrow) and hook.argument == self.argument:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.argument, int):
            if self.argument < len(args):
                new = self.narrowed(args[self.argument])
                args = (*args[: self.argument], new, *args[self.argument + 1 :])
        elif self.argument in kwargs:
            kwargs = kwargs | {self.argument: self.narrowed(kwargs[self.argument])}
        return args, kwargs

    def narrowed(self, value: Any) -> Any:
        """What the module gets in the place of this value."""
        if self.keep is None:
            return None
        if isinstance(value, Mask):
            return value if value.slopes is None else replace(value, slopes=self.narrowed(value.slopes))
        if not isinstance(value, Tensor):
            return value
        size = value.shape[self.axis]
        if size == 1 or size % self.heads:
            return value
        keep = torch.tensor(self.keep, dtype=torch.long, device=value.device)
        split = value.reshape(
            *value.shape[: self.axis], size // self.heads, self.heads, *value.shape[self.axis + 1 :]
        )
        return split.index_select(self.axis + 1, keep).flatten(self.axis, self.axis + 1)


def hooks(module: nn.Module) -> dict[str | int, Narrow]:
    """What is narrowed already, by argument."""
    return {hook.argument: hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Narrow)}


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str | int, Any]]:
    """The arguments of a call with their places or names."""
    yield from enumerate(args)
    yield from kwargs.items()


def inputs_of_heads(
    module: nn.Module, heads: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Input]:
    """The arguments of a module that hold something for every head, found by differentiating each head.

    heads: that the attention in the module has.
    """
    narrowed = hooks(module)
    leaves: dict[str | int, Tensor] = {}
    for argument, value in arguments(args, kwargs):
        many = narrowed[argument].heads if argument in narrowed else heads
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() > 1
            and any(size % many == 0 for size in value.shape)
        ):
            leaves[argument] = value.detach().clone().requires_grad_(True)
    found = [
        Input(argument, 0, _still_there(value.slopes.shape[0], narrowed.get(argument)))
        for argument, value in arguments(args, kwargs)
        if isinstance(value, Mask) and value.slopes is not None
    ]
    if not leaves:
        return found
    args = tuple(leaves.get(place, value) for place, value in enumerate(args))
    kwargs = {name: leaves.get(name, value) for name, value in kwargs.items()}
    touched: dict[str | int, list[Tensor]] = {}

    def see(call: Call) -> None:
        with torch._C.DisableTorchFunction():
            for head in range(call.site.heads):
                _touch(call, head, leaves, touched)

    with torch.enable_grad(), Interceptor(module, see):
        module(*args, **kwargs)
    for argument, axes in touched.items():
        many = narrowed[argument].heads if argument in narrowed else heads
        for axis, rows in enumerate(axes):
            of = _of_heads(rows, many)
            if of is not None:
                found.append(Input(argument, axis, of))
                break
    return found


def _touch(
    call: Call, head: int, leaves: dict[str | int, Tensor], touched: dict[str | int, list[Tensor]]
) -> None:
    """Note which entries of each argument one head depends on."""
    biases = [mask for mask in call.mask.tensors if mask.requires_grad and mask.dim() == 4]
    for tensor in (call.scores, call.output, *biases):
        if tensor is None or not tensor.requires_grad or tensor.shape[1] != call.site.heads:
            continue
        part = tensor[:, head]
        part = part.masked_fill(part.isinf(), 0.0)
        wave = (
            torch.arange(part.numel(), device=part.device, dtype=torch.float64).square().cos().to(part.dtype)
        )
        total = (part * wave.view(part.shape)).sum()
        found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
        for argument, gradient in zip(leaves, found, strict=True):
            if isinstance(gradient, Tensor):
                marks = gradient != 0
                axes = touched.setdefault(
                    argument,
                    [torch.zeros(call.site.heads, size, dtype=torch.bool) for size in marks.shape],
                )
                for axis, rows in enumerate(axes):
                    others = [other for other in range(marks.dim()) if other != axis]
                    rows[head] |= marks.any(others).cpu()


def _still_there(many: int, narrowed: Narrow | None) -> tuple[int | None, ...]:
    """The head of each of ``many`` entries, where some are passed over already."""
    keep = list(range(many)) if narrowed is None or narrowed.keep is None else narrowed.keep
    return tuple(keep.index(place) if place in keep else None for place in range(many))


def _of_heads(rows: Tensor, many: int) -> tuple[int | None, ...] | None:
    """For each of ``many`` entries the head (heads, entries) it belongs to; None unless it is like that."""
    if rows.shape[1] % many or bool((rows == rows[:1]).all()):
        return None
    folded = rows.view(len(rows), -1, many).any(1)  # (heads, many)
    if bool((folded.sum(0) > 1).any()):
        return None
    return tuple(int(column.nonzero()[0, 0]) if bool(column.any()) else None for column in folded.T)
