"""Modules with an argument for every head, such as an ALiBi bias: the present heads pick theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from manyheads.nn.mask import Mask


class Input(NamedTuple):
    """An argument with an entry for every head along ``axis``: head h has the entry ``entries[h]`` of each
    ``size``; None if it has none.
    """

    argument: str | int
    axis: int
    size: int
    entries: tuple[int | None, ...]

    def of(self, heads: Iterable[int]) -> list[int]:
        """The entries of these heads, within one batch element."""
        return [entry for head in heads if (entry := self.entries[head]) is not None]


class PickOptions(TypedDict):
    """The arguments of `Pick`, as they are saved."""

    argument: str | int
    axis: int
    heads: int
    keep: list[int] | None


class Pick:
    """A forward pre-hook that picks the entries of the heads that a module has out of one argument.

    Parameters
    ----------
    argument: the name of a keyword argument, or the number of a positional one.
    axis: of the heads in it.
    heads: how many there are on that axis; a multiple of them is batch * heads.
    keep: the numbers of those that are picked, some perhaps twice; None sets the argument to None.

    Examples
    --------
    >>> layer = nn.Identity()
    >>> Pick(argument=0, axis=1, heads=3, keep=[0, 2]).attach(layer)
    >>> layer(torch.arange(6).view(2, 3))
    tensor([[0, 2],
            [3, 5]])
    """

    def __init__(self, argument: str | int, axis: int, heads: int, keep: Sequence[int] | None) -> None:
        self.argument, self.axis, self.heads = argument, axis, heads
        self.keep = None if keep is None else list(keep)

    def options(self) -> PickOptions:
        """The arguments that make it again."""
        return {"argument": self.argument, "axis": self.axis, "heads": self.heads, "keep": self.keep}

    def attach(self, module: nn.Module) -> None:
        """Put it on a module; it replaces one for the same argument."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Pick) and hook.argument == self.argument:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if isinstance(self.argument, int):
            if self.argument < len(args):
                new = self.picked(args[self.argument])
                args = (*args[: self.argument], new, *args[self.argument + 1 :])
        elif self.argument in kwargs:
            kwargs = kwargs | {self.argument: self.picked(kwargs[self.argument])}
        return args, kwargs

    def picked(self, value: object) -> object:
        """The value with the entries of the present heads."""
        if self.keep is None:
            return None
        if isinstance(value, Mask):
            return value if value.slopes is None else replace(value, slopes=self._select(value.slopes))
        return self._select(value) if isinstance(value, Tensor) else value

    def _select(self, value: Tensor) -> Tensor:
        assert self.keep is not None
        size = value.shape[self.axis]
        if size == 1 or size % self.heads:
            return value
        keep = torch.tensor(self.keep, dtype=torch.long, device=value.device)
        split = value.reshape(
            *value.shape[: self.axis], size // self.heads, self.heads, *value.shape[self.axis + 1 :]
        )
        return split.index_select(self.axis + 1, keep).flatten(self.axis, self.axis + 1)


def hooks(module: nn.Module) -> dict[str | int, Pick]:
    """The hooks of a module, by argument."""
    return {hook.argument: hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Pick)}


def arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[tuple[str | int, object]]:
    """The arguments of a call with their positions or names."""
    yield from enumerate(args)
    yield from kwargs.items()
