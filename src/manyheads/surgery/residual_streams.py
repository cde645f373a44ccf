"""The residual stream of a model after each map that writes into it, as the model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from manyheads.common.types import Arguments, Function, Keywords

_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


def added(func: object, args: tuple[object, ...], written: Mapping[int, object]) -> list[int]:
    """Which tensors of ``written``, by their ids, a torch function adds to something of the same shape.

    >>> import torch
    >>> a, b = torch.ones(2), torch.ones(2)
    >>> added(torch.add, (a, b), {id(b): "b"}) == [id(b)], added(torch.mul, (a, b), {id(b): "b"})
    (True, [])
    """
    if not written or len(args) < 2 or getattr(func, "__name__", "") not in _SUMS:
        return []
    a, b = args[:2]
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
        return []
    return [key for key in written if key in (id(a), id(b))]


class Streams(TorchFunctionMode):
    """A context that collects the stream after each writer in `by_writer`, (..., d_model) by its name.

    Parameters
    ----------
    model: runs inside the context.
    writers: names of linear layers whose output is added to the stream.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1).eval()
    >>> with torch.no_grad(), Streams(model, ["blocks.0.attention.output"]) as streams:
    ...     _ = model(torch.rand(3, 5, 8))
    >>> streams.by_writer["blocks.0.attention.output"].shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, model: nn.Module, writers: Sequence[str]) -> None:
        super().__init__()
        self.by_writer: dict[str, Tensor] = {}
        self._modules = [(name, model.get_submodule(name)) for name in writers]
        self._hooks: list[RemovableHandle] = []
        self._written: dict[int, tuple[str, Tensor]] = {}

    def __enter__(self) -> Streams:
        self.by_writer = {}
        self._hooks = [module.register_forward_hook(self._note(name)) for name, module in self._modules]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._written.clear()

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for key in added(func, args, self._written):
            self.by_writer[self._written.pop(key)[0]] = result
        return result

    def _note(self, name: str) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
            self._written[id(output)] = name, output

        return hook
