"""Calls that leave a model, the random generators and the settings of torch as they were."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Restore = Callable[[], None]
_CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)
_DEEPEST = 4  # containers in containers
_OF_MODULES = frozenset(vars(nn.Module()))  # looked after by themselves, or hooks


@contextmanager
def evaluating(*models: nn.Module, draws: bool = False) -> Iterator[None]:
    """Models in eval mode; afterwards they are as they were, whatever ended the context: see `untouched`.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluating(model):
    ...     [module.training for module in model.modules()]
    [False, False, False]
    >>> [module.training for module in model.modules()]
    [True, True, False]
    """
    with untouched(*models, draws=draws):
        for model in models:
            model.eval()
        yield


@contextmanager
def untouched(*models: nn.Module, draws: bool = False) -> Iterator[None]:
    """Put back, module by module: training flags, requires_grad, buffers and plain attributes, with what is
    in lists, dicts, sets and tensors among them (the cache of a module that keeps its keys, say).

    Put back besides: the random generators of torch, numpy and Python, the grad mode, the default dtype, the
    number of threads, determinism, and whether tiny numbers are flushed to zero. With ``draws`` the random
    generators go on instead: for calls whose answer is drawn.

    What a call is meant to change (weights that are refitted) stays changed. A module that builds parts of
    itself when it first runs (nn.LazyLinear) keeps them.
    """
    restores = [_settings(), *(_module(module) for model in models for module in model.modules())]
    restores += [] if draws else [_generators()]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _module(module: nn.Module) -> Restore:
    if isinstance(module, torch.jit.ScriptModule):  # its attributes are not Python's
        return lambda: None
    attributes, buffers = dict(module.__dict__), dict(module._buffers)
    parts = [*module._parameters, *module._modules]
    tensors = [*module._parameters.values(), *buffers.values()]
    lazy = any(tensor is not None and is_lazy(tensor) for tensor in tensors)
    flags = [(tensor, tensor.requires_grad) for tensor in tensors if tensor is not None]
    values = [] if lazy else [_value(buffer) for buffer in buffers.values() if _has_values(buffer)]
    for name, value in attributes.items():
        if name not in _OF_MODULES:
            values += _contents(value)

    def restore() -> None:
        for tensor, flag in flags:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        if lazy or parts != [*module._parameters, *module._modules]:
            module.__dict__["training"] = attributes["training"]
            return
        module.__dict__.clear()
        module.__dict__.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        for put_back in values:
            put_back()

    return restore


def _contents(value: object, depth: int = 0) -> list[Restore]:
    """What puts back the things inside a plain container, or the numbers of a tensor that is no parameter."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and value.layout == torch.strided and not value.requires_grad
        return [_value(value)] if is_plain and _has_values(value) else []
    if type(value) not in _CONTAINERS or depth == _DEEPEST:
        return []
    copied = copy.copy(value)
    parts = value.values() if isinstance(value, dict) else cast("Iterable[object]", value)
    restores = [restore for part in parts for restore in _contents(part, depth + 1)]
    return [lambda: _refill(value, copied), *restores]


def _refill(container: Any, content: Any) -> None:
    """Put the same things into a container as were in it, unless they still are."""
    if _identities(container) == _identities(content):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content)


def _identities(container: Any) -> object:
    if isinstance(container, set):
        return {id(x) for x in container}
    things = [*container, *container.values()] if isinstance(container, dict) else container
    return [id(x) for x in things]


def _has_values(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return buffer is not None and not buffer.is_meta and buffer.layout == torch.strided


def _value(buffer: Tensor) -> Restore:
    """Copy a buffer back if it was written to; its version does not show that (batch norm leaves it)."""
    values = buffer.detach().clone()

    def restore() -> None:
        if not torch.equal(buffer, values):
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(values)

    return restore


def _generators() -> Restore:
    python, old_numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(old_numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)

    return restore


def seed_generators(seed: int) -> None:
    """Seed torch's generators, those of devices that are in use.

    torch.manual_seed seeds the others, too, for the time when they are used first. That would stay after the
    call, and each time it writes down the stack of its caller for each kind of device: milliseconds.

    >>> seed_generators(7)
    >>> first = torch.rand(3)
    >>> _ = torch.manual_seed(7)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.xpu.is_initialized():
        torch.xpu.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _settings() -> Restore:
    """Each is set only if it changed: setting a number of threads again is not free."""
    settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (_deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])),
        (_cudnn, _set_cudnn),
        (flushes_denormals, torch.set_flush_denormal),
    ]
    values = [read() for read, _ in settings]

    def restore() -> None:
        for (read, write), value in zip(settings, values, strict=True):
            if read() != value:
                write(value)

    return restore


def flushes_denormals() -> bool:
    """Whether this thread's CPU flushes denormal numbers to zero; torch cannot say.

    >>> flushes_denormals()
    False
    """
    return sys.float_info.min * 0.5 == 0.0


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _cudnn() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def _set_cudnn(state: tuple[bool, bool]) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = state
