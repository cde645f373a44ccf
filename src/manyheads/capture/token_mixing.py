"""Modules that carry something from one token to another in a way that was not seen.

A model is run twice, the second time with one sequence or one token replaced, while every attention call that
is seen gives what it gave before. Then a change stays at its sequence or token, unless something else carries
it on. Where it does, the module is noted and its result put back, so that the modules behind it are judged by
themselves.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from manyheads.capture.tensor_tags import memory_of, version_of
from manyheads.common.nested_tensors import tensors_in
from manyheads.common.types import Arguments, Function, Keywords

# Names of the functions that mix tokens; the first that ran in a module names the kind.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("convolution", ("conv1d", "conv2d", "conv3d", "conv_transpose", "unfold")),
    ("recurrence", ("gru", "lstm", "rnn_tanh", "rnn_relu", "gru_cell", "lstm_cell")),
    ("Fourier transform", ("fft",)),
    ("norm over tokens", ("group_norm", "instance_norm", "batch_norm")),
    ("pooling", ("avg_pool", "max_pool", "adaptive")),
    ("scan", ("cumsum", "cumprod", "logcumsumexp")),
    ("sigmoid of scores", ("sigmoid",)),
    ("softmax by hand, or over other axes than keys", ("softmax", "exp")),
    ("scores without a softmax", ("relu", "elu", "softplus", "square", "pow")),
)
# Of these there may be something beside attention in a module that takes nothing from what attention gives.
_BESIDE = {"convolution", "recurrence", "Fourier transform", "norm over tokens", "pooling", "scan"}
_PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm", "linear")
_TINY = 1e-5
_ENOUGH = 0.3  # of the largest number
_SORTED = 4096  # tokens that are looked for one by one
# Modules that cannot mix tokens.
_POINTWISE = (
    nn.Dropout,
    nn.Identity,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
)


class Baseline:
    """A context that remembers what went into and came out of every module of one run.

    functions: the names of the torch functions that ran in each module itself, not in its parts.
    choosing: modules in which tokens are chosen by what is in others.
    products: what maps of rows (`row_map`) took and gave, one after the other.
    """

    def __init__(self, module: nn.Module, paths: Mapping[int, str]) -> None:
        self.module = module
        self.paths = paths
        self.inputs: dict[tuple[str, int], list[Tensor]] = {}
        self.outputs: dict[tuple[str, int], list[Tensor]] = {}
        self.functions: dict[str, set[str]] = {}
        self.opaque: dict[str, str] = {}
        self.choosing: set[str] = set()
        self.products: dict[object, list[tuple[Tensor, Tensor]]] = {}
        self.ids: list[Tensor] = []  # of every embedding
        self._stack: list[tuple[str, int]] = []
        self._runs: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # by id, with the version

    def __enter__(self) -> Baseline:
        for part in self.module.modules():
            if not isinstance(part, _POINTWISE):
                before = part.register_forward_pre_hook(self._begin, with_kwargs=True)
                self._handles += [before, part.register_forward_hook(self._end)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def see(self, func: Function) -> None:
        """Note that a function runs now."""
        path = self._stack[-1][0] if self._stack else ""
        name = getattr(func, "__name__", "") or str(func)
        self.functions.setdefault(path, set()).add(name)
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self.opaque[path] = str(func)

    def keep(self, func: Function, args: Arguments, data: Tensor, result: Tensor, handed: Tensor) -> None:
        """Keep what a product of ``data`` with weights gave; the model gets a copy of it, ``handed``."""
        row = row_map(func, args)
        if row is not None and row[1] is data:
            with torch._C.DisableTorchFunction():
                kept = result.detach()
                self._copies[id(handed)] = weakref.ref(handed), version_of(handed), kept
                self.products.setdefault(row[0], []).append((self._copy(data), kept))

    def enter_run(self, module: nn.Module) -> tuple[str, int]:
        """A module begins to run: which one, and for which time."""
        path = self.paths[id(module)]
        number = self._runs[path] = self._runs.get(path, 0) + 1
        self._stack.append((path, number))
        return path, number

    def leave_run(self) -> tuple[str, int]:
        """The innermost module ends."""
        return self._stack.pop()

    @property
    def innermost(self) -> str | None:
        """The module that runs now."""
        return self._stack[-1][0] if self._stack else None

    def _begin(
        self, module: nn.Module, args: Arguments, kwargs: Keywords
    ) -> tuple[Arguments, Keywords] | None:
        with torch._C.DisableTorchFunction():
            self.inputs[self.enter_run(module)] = [self._copy(x) for x in tensors_in((args, kwargs))]
        return None  # the arguments stay

    def _end(self, module: nn.Module, args: Arguments, output: object) -> object:
        with torch._C.DisableTorchFunction():
            self.outputs[self.leave_run()] = [self._copy(x) for x in tensors_in(output)]
        return None  # the output stays

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor; the one that there is, where nothing was written to it since."""
        kept, version = self._copies.get(id(tensor)), version_of(tensor)
        if kept is None or kept[0]() is not tensor or version < 0 or kept[1] != version:
            kept = self._copies[id(tensor)] = weakref.ref(tensor), version, tensor.detach().clone()
        return kept[2]


class Perturbed(Baseline):
    """A context for the second run: compares it with the first, and puts back what got to other tokens.

    count: how many tokens, or sequences, there are, of which one was replaced; ``index``: which one.
    sequences: how many there are of them.
    pairs: numbers of queries and keys of attention: a tensor of such axes has a number for each pair.
    leaks: the modules in which something got to others.
    one_by_one: what was replaced may have come to one sequence alone, so that this is no sign that it stayed
        where it was.
    """

    one_by_one = False

    def __init__(
        self, first: Baseline, count: int, index: int, sequences: int, pairs: set[tuple[int, int]]
    ) -> None:
        super().__init__(first.module, first.paths)
        self.first, self.count, self.index, self.sequences = first, count, index, sequences
        self.pairs, self._whole = pairs, False
        self.leaks: set[str] = set()
        self._judged: dict[tuple[int, int], tuple[weakref.ref[Tensor], int, bool]] = {}  # by both ids
        self._changed_runs: dict[str, set[int]] = {}

    def _begin(
        self, module: nn.Module, args: Arguments, kwargs: Keywords
    ) -> tuple[Arguments, Keywords] | None:
        with torch._C.DisableTorchFunction():
            parent = self.innermost
            now = self.enter_run(module)
            self._whole = False
            if _is_leaf(module):  # what comes out of it tells enough
                return None
            contained = self._contained((args, kwargs), self.first.inputs.get(now), parent, now)
            return cast("tuple[Arguments, Keywords] | None", contained)

    def _end(self, module: nn.Module, args: Arguments, output: object) -> object:
        with torch._C.DisableTorchFunction():
            now = self.leave_run()
            self._whole = not _is_leaf(module)  # inside a module tokens may be rolled, and back
            kept = self._contained(output, self.first.outputs.get(now), now[0], now)
            if kept is not None and _is_leaf(module) and self._any_leaks(args, self.first.inputs.get(now)):
                self.leaks.discard(now[0])
                self.leaks.update([self.innermost] if self.innermost is not None else [])
            return kept

    def _any_leaks(self, value: object, before: list[Tensor] | None) -> bool:
        pairs = zip(tensors_in(value), before or (), strict=False)
        return any(new.shape == old.shape and self._leaks(new, old) for new, old in pairs)

    def _contained(
        self, value: object, before: list[Tensor] | None, path: str | None, run: tuple[str, int]
    ) -> object:
        """The value with what got too far put back; None when nothing did. ``path`` is to blame, ``run``
        runs."""
        now = list(tensors_in(value))
        if before is None or path is None or [x.shape for x in now] != [x.shape for x in before]:
            return None
        leaked = {
            i: old for i, (new, old) in enumerate(zip(now, before, strict=True)) if self._leaks(new, old)
        }
        if not leaked or self._is_one_of_many(run):
            return None
        self.leaks.add(path)
        kept = {i: self._put_back(now[i], old) for i, old in leaked.items()}
        numbers = iter(range(len(now)))
        return rebuilt(value, lambda x: kept.get(next(numbers), x))

    def _is_one_of_many(self, run: tuple[str, int]) -> bool:
        """Whether a module is run for each sequence, or token, and this is the run for the one replaced."""
        path, number = run
        runs = self.first._runs[path]
        changed = self._changed_runs.setdefault(path, set())
        changed.add(number)
        return runs > 1 and runs % self.count == 0 and len(changed) <= runs // self.count

    def _leaks(self, new: Tensor, old: Tensor) -> bool:
        """Whether something changed that should not have; judged once where modules hand a tensor on."""
        key, version = (id(new), id(old)), version_of(new)
        kept = self._judged.get(key)
        if kept is None or kept[0]() is not new or version < 0 or kept[1] != version:
            kept = self._judged[key] = weakref.ref(new), version, self._changed_elsewhere(new, old)
        return kept[2]

    def _changed_elsewhere(self, new: Tensor, old: Tensor) -> bool:
        if not new.is_floating_point() or new.dim() < 2 or new.is_nested or new.numel() == 0:
            return False
        changed = new != old
        if self.is_confined(changed.any(-1)):  # most often so, and quickly told
            return False
        changed &= (new - old).abs_() > _TINY * old.abs().nan_to_num_(0.0, 0.0, 0.0).max()
        if not bool(changed.any()):
            return False
        of_tokens = [size % self.count == 0 for size in new.shape]
        if all(size == 1 for size in new.shape[1:-1]) and not any(of_tokens):
            return False  # a vector for each sequence, as pooling gives, or a sequence of one token
        if (new.shape[-2], new.shape[-1]) in self.pairs:
            return False
        return not (self.is_confined(changed) or self._is_reordered(new, old))

    def _is_reordered(self, new: Tensor, old: Tensor) -> bool:
        """Whether there is nothing new but the share of what was replaced, in another order: tokens that are
        sorted by the expert they go to.
        """
        rows, before = (x.flatten(0, -2).float().nan_to_num() for x in (new, old))
        if len(rows) > _SORTED or int((rows != before).any(-1).sum()) <= self._share(len(rows)):
            return False
        tiny = _TINY * float(before.norm(dim=-1).max())
        unknown = (torch.cdist(rows, before, compute_mode="donot_use_mm_for_euclid_dist") > tiny).all(1)
        return int(unknown.sum()) <= self._share(len(rows))

    def _put_back(self, new: Tensor, old: Tensor) -> Tensor:
        """The old values, but for those of what was replaced; of one position where it is unknown which they
        are.
        """
        axes = [axis for axis, size in enumerate(new.shape) if size == self.count]
        if len(axes) != 1:
            return _one_position(new, old)
        kept = old.clone()
        _replace(kept.select(axes[0], self.index), new.select(axes[0], self.index), old)
        return kept

    def is_confined(self, changed: Tensor) -> bool:
        """Whether what changed has one index, or its share of them, along some axis."""
        for axis, size in enumerate(changed.shape):
            others = [other for other in range(changed.dim()) if other != axis]
            indices = changed.any(others) if others else changed
            if size == self.sequences and self.one_by_one:
                continue
            if size > 1 and int(indices.sum()) <= self._share(size):
                if self._whole and size == self.count and not bool(indices[self.index]):
                    continue  # one token alone, and another than the one replaced
                return True
        return False

    def _share(self, size: int) -> int:
        """How many of ``size`` indices may belong to what was replaced: its share of the tokens; one in every
        sequence where they are others (a class token, padding, another input) and one behind the other.
        """
        if size % self.count == 0:
            return size // self.count
        return self.sequences if size % self.sequences == 0 and size > self.sequences else 1


def row_map(func: Function, args: Arguments) -> tuple[object, Tensor] | None:
    """What tells a linear map from others, and its data (..., width), where it maps each row by itself, with
    parameters or buffers alone.
    """
    if func is F.linear:
        data, constants = args[0], args[1:]
    elif func is torch.addmm and len(args) == 3 and args[0].dim() == 1:
        data, constants = args[1], (args[2], args[0])
    else:
        return None
    if type(data) is not Tensor or data.dim() < 2 or constants[0].dim() != 2:
        return None
    sizes = ((x.storage_offset(), x.shape, x.stride(), version_of(x)) for x in constants if x is not None)
    where = (memory_of(x) for x in constants if x is not None)
    return (func, *where, *sizes), data


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _one_position(new: Tensor, old: Tensor) -> Tensor:
    """The old values, but for one place of every sequence, where the change is largest."""
    kept = old.clone()
    change = (new - old).abs().nan_to_num(0.0)
    at = [int(i) for i in torch.unravel_index(change.flatten().argmax(), change.shape)]
    where: tuple[int | slice, ...] = (slice(None), *at[1:]) if new.dim() > 2 else (at[0],)
    _replace(kept[where], new[where], old)
    return kept


def _replace(part: Tensor, new: Tensor, old: Tensor) -> None:
    """Change a place of a tensor, enough to be seen by the modules behind: what one token changes fades
    where every module mixes some more.
    """
    change = new - part
    largest, size = float(change.abs().max()), float(old.abs().nan_to_num(0.0, 0.0, 0.0).max())
    factor = max(1.0, _ENOUGH * size / largest) if largest and math.isfinite(largest) else 1.0
    part += change * factor


def rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples and mappings with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is not dict:
        for key in list(value):
            value[key] = rebuilt(value[key], change)
        return value
    if isinstance(value, Mapping):
        return {key: rebuilt(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(rebuilt(item, change) for item in value)
    return value


def reasons(leaks: Collection[str], first: Baseline, seen: set[str]) -> dict[str, str]:
    """What `missed` says of each module in which something got from token to token."""
    modules = {first.paths[id(part)]: part for part in first.module.modules()}
    texts = {}
    for path in modules:
        if path in leaks:
            kind = _kind(path, first)
            half = "one part of it was seen, another was not: " if path in seen else ""
            texts[path] = (
                f"{half}{type(modules[path]).__name__} mixes tokens without attention that was seen ({kind})"
            )
    return texts


def is_beside_attention(path: str, first: Baseline) -> bool:
    """Whether what mixes tokens in a module is of a kind of its own, and no other part of its attention."""
    return _kind(path, first) in _BESIDE


def _kind(path: str, first: Baseline) -> str:
    names = first.functions.get(path, set())
    if path in first.choosing:
        return "a choice of tokens by what is in others"
    if path in first.opaque:
        return f"an opaque operator, {first.opaque[path]}"
    for kind, functions in _KINDS:
        if any(name.startswith(functions) or f"_{name}".endswith(functions) for name in names):
            return kind
    return "a product over tokens" if any(name in _PRODUCTS for name in names) else "an opaque operator"
