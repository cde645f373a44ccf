"""Modules that read the width of all their heads off their input: the input reports that width.

``batch, length, width = x.shape`` and later ``y.view(batch, length, width)`` or ``width // self.heads``: such
code takes the width of its input for that of all heads together. When heads are cut or added, the two differ.
So the input reports the width of the heads as its shape; computations still use the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Reshaped:
    """A stand-in for a tensor that reports another shape.

    tensor: the tensor, which every function and method gets instead.
    shape: the shape that it reports.

    >>> x = Reshaped(torch.ones(2, 3), torch.Size((2, 7)))
    >>> x.shape, x.size(-1), torch.sum(x), type(x + 1)
    (torch.Size([2, 7]), 7, tensor(6.), <class 'torch.Tensor'>)
    """

    def __init__(self, tensor: Tensor, shape: torch.Size) -> None:
        self.tensor, self.shape = tensor, shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> object:
        if name == "tensor" or name.startswith("__"):  # as when it is copied
            raise AttributeError(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        args, kwargs = tree_map_only(Reshaped, lambda x: x.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator(name: str) -> Callable[..., object]:
    def operator(self: Reshaped, *others: object) -> object:
        return getattr(self.tensor, name)(*others)

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "rmatmul", "neg", "getitem"):
    setattr(Reshaped, f"__{_name}__", _operator(f"__{_name}__"))


class Width:
    """A forward pre-hook by which the input of a module reports another width.

    Parameters
    ----------
    before: the width that inputs have; others are left as they are.
    after: the width that they report.
    axis: of the width, 1 in images (batch, width, height, width).

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
        """Put it on a module; it replaces the one that is there."""
        detach(module)
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        new = {name: self.with_width(value) for name, value in kwargs.items()}
        return tuple(self.with_width(value) for value in args), new

    def with_width(self, value: object) -> object:
        """The value, or its stand-in if it is a tensor of this width."""
        if not isinstance(value, Tensor) or value.dim() < 3 or value.shape[self.axis] != self.before:
            return value
        shape = list(value.shape)
        shape[self.axis] = self.after
        return Reshaped(value, torch.Size(shape))


@contextmanager
def reporting(model: nn.Module, widths: Mapping[str, Width]) -> Iterator[None]:
    """A context in which the inputs of the modules at these paths report these widths."""
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
    """The hook of a module, if it has one."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Width)), None)


def detach(module: nn.Module) -> None:
    """Remove the hook of a module."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Width):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
