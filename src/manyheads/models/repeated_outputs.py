"""Projections that compute a key or value once and give it to several heads.

Where a class has as many key heads as heads, `merge` cannot tell it to have fewer. Then the projection itself
is smaller, and its output is repeated before anything reads it: the class sees what it always saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn


class RepeatOptions(TypedDict):
    """The arguments of `Repeat`, as they are saved."""

    indices: list[int]
    heads: list[list[int]]


class Repeat:
    """A forward hook that repeats outputs of a linear layer.

    Parameters
    ----------
    indices: for each output that is read, the output of the layer that it is.
    heads: for each output that is read, the heads that read it.

    Examples
    --------
    Two heads of width 1 that share a key:

    >>> layer = nn.Linear(3, 1)
    >>> Repeat(indices=[0, 0], heads=[[0], [1]]).attach(layer)
    >>> layer(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(self, indices: Sequence[int], heads: Sequence[Sequence[int]]) -> None:
        if len(indices) != len(heads):
            raise ValueError(f"heads: got {len(heads)} for {len(indices)} outputs; expected one for each")
        self.indices, self.heads = list(indices), [list(each) for each in heads]

    def options(self) -> RepeatOptions:
        """The arguments that make it again."""
        return {"indices": self.indices, "heads": self.heads}

    def attach(self, module: nn.Module) -> None:
        """Put it on a module; it replaces the one that is there."""
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Repeat):
                del module._forward_hooks[key]
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
        index = torch.tensor(self.indices, dtype=torch.long, device=output.device)
        return output.index_select(-1, index)


def repeat_of(module: nn.Module) -> Repeat | None:
    """The hook of a module, if it has one."""
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, Repeat)), None)
