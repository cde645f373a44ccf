"""Modules that read the width of all their heads off their input: they are told the width that is left.

``batch, length, width = x.shape`` and later ``y.view(batch, length, width)`` or ``width // self.heads``: such
code takes the width of its input for that of all heads together. When heads go, the two differ. So the input
says the width that the heads that are left have together; what is computed from it is computed from what it
is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Saying:
    """Stands for a tensor, and says that it has another shape.

    tensor: the tensor, which every function and method is given in its place.
    shape: what it says.

    >>> x = Saying(torch.ones(2, 3), torch.Size((2, 7)))
    >>> x.shape, x.size(-1), torch.sum(x), type(x + 1)
    (torch.Size([2, 7]), 7, tensor(6.), <class 'torch.Tensor'>)
    """

    def __init__(self, tensor: Tensor, shape: torch.Size) -> None:
        self.tensor, self.shape = tensor, shape

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name == "tensor" or name.startswith("__"):  # as when it is copied
            raise AttributeError(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Saying, lambda x: x.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator(name: str) -> Any:
    def operator(self: Saying, *others: Any) -> Any:
        return getattr(self.tensor, name)(*others)

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "rmatmul", "neg", "getitem"):
    setattr(Saying, f"__{_name}__", _operator(f"__{_name}__"))


class Width:
    """A forward pre-hook by which the input of a module says another width.

    Parameters
    ----------
    before: the width that inputs have; others are left as they are.
    after: the width that they say.
    axis: of the width, 1 in pictures (batch, width, height, width).

    Examples
    --------
    >>> class Heads(nn.Module):
    ...     def forward(self, x):
    ...         return x[..., :4].reshape(x.shape[0], 2, x.shape[-1] // 2)
    >>> layer = Heads()
    >>> Width(before=6, after=4).attach(layer)
    >>> layer(torch.ones(3, 1, 6)).shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, before: int, after: int, axis: int = -1) -> None:
        self.before, self.after, self.axis = before, after, axis

    def options(self) -> dict[str, int]:
        """The arguments that make it again."""
        return {"before": self.before, "after": self.after, "axis": self.axis}

    def attach(self, module: nn.Module) -> None:
        """Put it on a module, in the place of the one that is there."""
        detach(module)
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new = {name: self.told(value) for name, value in kwargs.items()}
        return tuple(self.told(value) for value in args), new

    def told(self, value: Any) -> Any:
        """What the module gets in the place of this value."""
        if not isinstance(value, Tensor) or value.dim() < 3 or value.shape[self.axis] != self.before:
            return value
        shape = list(value.shape)
        shape[self.axis] = self.after
        return Saying(value, torch.Size(shape))


@contextmanager
def telling(model: nn.Module, widths: Mapping[str, Width]) -> Iterator[None]:
    """A context in which the inputs of the modules at these paths say these widths."""
    before = {path: width_of(model.get_submodule(path)) for path in widths}
    for path, width in widths.items():
        width.attach(model.get_submodule(path))
    try:
        yield
    finally:
        for path, earlier in before.items():
            detach(model.get_submodule(path))
            if earlier is not None:
                earlier.attach(model.get_submodule(path))


def width_of(module: nn.Module) -> Width | None:
    """What the inputs of a module say already."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Width)), None)


def detach(module: nn.Module) -> None:
    """Let the inputs of a module say what they are."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Width):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
