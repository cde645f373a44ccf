"""Which weights and which tokens a tensor was made of, found by differentiating it.

`Marks` runs a model so that every product with weights starts a new history: its result is a *leaf*, whose
axes are either of the weights (their rows) or of the data (sequences, tokens). A tensor that comes later is
then differentiated by the leaves (`destinations`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from manyheads.capture.call import SDPA
from manyheads.capture.destinations import cotangent, in_double
from manyheads.capture.tensor_mode import TensorMode
from manyheads.capture.tensor_tags import memory_of
from manyheads.common.nested_tensors import tensors_in
from manyheads.common.types import Arguments, Function, Keywords

_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
_MATMULS = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm,
    Tensor.bmm,
}  # fmt: skip
_ADDED_MATMULS = {torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm}
_PRODUCTS = {F.linear, torch.einsum, F.bilinear, *_CONVOLUTIONS, *_MATMULS, *_ADDED_MATMULS}
_NORMS = {
    F.layer_norm,
    torch.layer_norm,
    F.rms_norm,
    torch.rms_norm,
    F.group_norm,
    torch.group_norm,
    F.normalize,
}
_NORMALISERS = {
    torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.norm, Tensor.norm, torch.linalg.vector_norm,
    torch.linalg.norm, torch.var, Tensor.var, torch.std, Tensor.std, torch.amax, Tensor.amax,
}  # fmt: skip
NO_WEIGHTS = hash(())  # stands for the weights of what comes in from outside


@dataclass(eq=False)
class Leaf:
    """The result of a product with weights.

    tensor: the result.
    rows: its axes that belong to the weights; the others belong to the data.
    weights: a number that says which weights, by their place in memory and their shape.
    number: which of all leaves of a run it is.
    """

    tensor: Tensor
    rows: tuple[int, ...]
    weights: int
    number: int

    def by_row(self, elements: Tensor) -> Tensor:
        """Something about each element (n, *shape of the leaf), as (n, rows, data)."""
        rows = [axis % self.tensor.dim() + 1 for axis in self.rows]
        data = [axis for axis in range(1, elements.dim()) if axis not in rows]
        moved = elements.permute(0, *rows, *data)
        return moved.reshape(len(elements), self.row_count, -1)

    @property
    def row_count(self) -> int:
        """How many rows of weights there are."""
        count = 1
        for axis in self.rows:
            count *= self.tensor.shape[axis]
        return count


class Marks(TensorMode):
    """A context in which products with weights give leaves.

    constants: tensors that hold no data: parameters and buffers.
    see: told each function that runs.
    keep: told each product of data with parameters or buffers: the function, its arguments, which of them are
        the data, the leaf, and what the model gets.
    forced: a model that switches gradients off is differentiated all the same.
    """

    def __init__(
        self,
        constants: Sequence[Tensor],
        see: Callable[[Function], None],
        keep: Callable[[Function, Arguments, Tensor, Tensor, Tensor], None],
        forced: bool = False,
    ) -> None:
        super().__init__()
        self._see, self._keep, self._forced = see, keep, forced
        self._storages = {memory_of(x) for x in constants}
        self._constant: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # made of constants alone, and when
        # (rows, weights, number) of each leaf that something can still be differentiated by
        self._leaves: MutableMapping[Tensor, tuple[tuple[int, ...], int, int]] = WeakTensorKeyDictionary()
        self._count = 0
        self.outputs: dict[int, Tensor] = {}  # what attention calls gave, as leaves of their own
        self.readers: dict[int, list[bool]] = {}  # products that read them: whether nothing else
        self._of_heads: dict[
            int, weakref.ref[Tensor]
        ] = {}  # made of what attention calls gave, and of no product since

    def called(self, func: Function, args: Arguments, kwargs: Keywords) -> object:
        """The result of a function, which may start a new history."""
        if self._forced and func is torch._C._set_grad_enabled:
            return None
        self._see(func)
        tensors = [x for value in (*args, *kwargs.values()) for x in tensors_in(value)]
        fixed = [self.is_constant(x) for x in tensors]
        if func in _PRODUCTS and any(fixed) and not all(fixed):
            return self._product(func, args, kwargs, tensors, fixed)
        if func is F.linear and all(fixed):  # learned queries: they have weights behind them like others
            out = self.leaf(func(*args, **kwargs), (-1,), tensors[1:2])
            self._remember(out)
            return out
        if func is F.embedding:
            return self.leaf(func(*args, **kwargs), (-1,), tensors[-1:])
        if func in SDPA:  # with a bias that is differentiated it would compute all scores at once
            args = tuple(_without_history(x) if index == 3 else x for index, x in enumerate(args))
            kwargs = {name: _without_history(x) if name == "attn_mask" else x for name, x in kwargs.items()}
        out = func(*args, **kwargs)
        if self._of_heads and any(self._reads_heads(x) for x in tensors):
            for result in tensors_in(args[0] if func is Tensor.__setitem__ else out):
                self.follow(result)
        elif isinstance(out, Tensor):
            if all(fixed) and id(out) not in self._constant:
                self._remember(out)
            elif func in _NORMS and tensors[0].requires_grad:
                return out.detach() + (tensors[0] - tensors[0].detach()).to(out.dtype)
            elif func in _NORMALISERS and _keeps_last(args, kwargs, out):
                return out.detach()
        return out

    def leaf(self, out: Tensor, rows: tuple[int, ...], weights: Sequence[Tensor]) -> Tensor:
        """Start a new history with a result."""
        if not out.is_floating_point() or torch._C._functorch.is_functorch_wrapped_tensor(out):
            return out
        tensor = out.detach().requires_grad_()
        address = hash(tuple((memory_of(x), x.storage_offset(), x.shape, x.stride()) for x in weights))
        self._count += 1
        self._leaves[tensor] = rows, address, self._count
        return tensor.clone()  # which may be written to

    def leaves(self, tensor: Tensor) -> list[Leaf]:
        """The leaves that a tensor was made of."""
        sources = leaves_of(tensor)
        return [Leaf(leaf, *self._leaves[leaf]) for leaf in sources if leaf in self._leaves]

    def output(self, out: Tensor) -> Tensor:
        """Start a new history with what an attention call gave: a leaf."""
        tensor = out.detach().requires_grad_()
        self.outputs[id(tensor)] = tensor
        return tensor

    def follow(self, tensor: Tensor) -> Tensor:
        """Remember that a tensor is made of what an attention call gave."""
        key, kept = id(tensor), self._of_heads
        kept[key] = weakref.ref(tensor, lambda _: kept.pop(key, None))
        return tensor

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a view of one, or was made of constants alone."""
        kept = self._constant.get(id(tensor))
        if kept is not None and kept[0]() is tensor:
            return kept[1] == tensor._version  # nothing was written to it since
        if tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        return tensor.numel() > 0 and memory_of(tensor) in self._storages

    def _remember(self, tensor: Tensor) -> None:
        key, kept = id(tensor), self._constant
        kept[key] = weakref.ref(tensor, lambda _: kept.pop(key, None)), tensor._version

    def _reads_heads(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from what an attention call gave: then what happens to it is of interest."""
        kept = self._of_heads.get(id(tensor))
        return kept is not None and kept() is tensor

    def _product(
        self,
        func: Function,
        args: Arguments,
        kwargs: Keywords,
        tensors: list[Tensor],
        fixed: list[bool],
    ) -> object:
        for x, constant in zip(tensors, fixed, strict=True):
            if not constant and self._reads_heads(x):
                self._read(x)
        data = {id(x) for x, constant in zip(tensors, fixed, strict=True) if not constant}
        out = func(
            *(_detached(arg, data) for arg in args), **{k: _detached(arg, data) for k, arg in kwargs.items()}
        )
        weights = [x for x, constant in zip(tensors, fixed, strict=True) if constant and x.dim() > 1]
        rows = _rows(func, args, tensors, fixed, out)
        if not (weights and rows):
            return out
        handed = self.leaf(out, rows, weights)
        stays = all(memory_of(x) in self._storages for x, c in zip(tensors, fixed, strict=True) if c)
        if stays and not kwargs and fixed.count(False) == 1:
            self._keep(func, args, tensors[fixed.index(False)], out, handed)
        return handed

    def _read(self, data: Tensor) -> None:
        """Note what a product with weights reads of the outputs of heads."""
        heads = [leaf for leaf in leaves_of(data) if id(leaf) in self.outputs]
        if not heads:
            return
        with torch._C.DisableTorchFunction():
            weights = cotangent(data)
            gradients = torch.autograd.grad(data, heads, weights, retain_graph=True, allow_unused=True)
            parts = [
                in_double(x.detach() * g).sum()
                for x, g in zip(heads, gradients, strict=True)
                if g is not None
            ]
            whole, size = (
                in_double(data.detach() * weights).sum(),
                in_double(data.detach() * weights).abs().sum(),
            )
            linear = bool((whole - sum(parts)).abs() <= 1e-3 * size + 1e-12)
        for leaf in heads:
            self.readers.setdefault(id(leaf), []).append(linear)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor's history starts from."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    waiting, seen, leaves = [tensor.grad_fn], set(), []
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [before for before, _ in node.next_functions]
    return leaves


def _without_history(value: object) -> object:
    return value.detach() if type(value) is Tensor and value.requires_grad else value


def _detached(value: object, data: set[int]) -> object:
    if isinstance(value, Tensor):
        return value.detach() if id(value) in data else value
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)([_detached(item, data) for item in value])
    return value


def _keeps_last(args: Arguments, kwargs: Keywords, out: Tensor) -> bool:
    """Whether a reduction is over the last axis and keeps it, as the normaliser of a norm written by hand."""
    before = next((x for value in (*args, *kwargs.values()) for x in tensors_in(value)), None)
    if before is None or before.dim() != out.dim() or before.dim() < 2:
        return False
    return before.shape[:-1] == out.shape[:-1] and out.shape[-1] == 1 != before.shape[-1]


def _rows(
    func: Function, args: Arguments, tensors: list[Tensor], fixed: list[bool], out: Tensor
) -> tuple[int, ...]:
    """The axes of a product's result that belong to its weights."""
    if func in _CONVOLUTIONS:
        return (out.dim() - tensors[1].dim() + 1,)
    if func is torch.einsum:
        return _rows_of_einsum(args, fixed)
    if func in _MATMULS or func in _ADDED_MATMULS:
        added = int(func in _ADDED_MATMULS)
        left, right = tensors[added : added + 2]
        if func is Tensor.__rmatmul__:
            left, right = right, left
        weights, end = (right, -1) if fixed[added + 1] else (left, -2)
        if weights.dim() < 2 or out.dim() < 2:
            return ()
        lead = [axis for axis in range(-weights.dim(), -2) if not _is_repeated(weights, axis)]
        return (*lead, end)
    return (-1,)


def _is_repeated(weights: Tensor, axis: int) -> bool:
    """Whether weights are the same at every index of an axis, as those that were expanded to a batch."""
    if weights.shape[axis] == 1 or weights.stride(axis) == 0:
        return True
    first = weights.narrow(axis, 0, 1)
    return bool(torch.equal(weights, first.expand_as(weights)))


def _rows_of_einsum(args: Arguments, fixed: list[bool]) -> tuple[int, ...]:
    if not isinstance(args[0], str) or "->" not in args[0] or "..." in args[0]:
        return (-1,)
    left, out = args[0].replace(" ", "").split("->")
    letters = {c for word, constant in zip(left.split(","), fixed, strict=False) if constant for c in word}
    return tuple(axis - len(out) for axis, letter in enumerate(out) if letter in letters)
