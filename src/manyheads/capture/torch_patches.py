"""What interception needs of the process around it, shared by all interceptors: the compiler off,
checkpoints told.

Patches are made when the first interceptor starts and undone when the last one ends, so contexts may
overlap in any order and thread.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from manyheads.common.types import Function

if TYPE_CHECKING:
    from manyheads.capture.interceptor import Interceptor, State

# What torch.utils.checkpoint.checkpoint looks up when it is called, however it was imported: who keeps what
# is to be run again, without and with reentering.
_FRAME = "_CheckpointFrame"
_FUNCTION = "CheckpointFunction"

# What torch warns about only because compiled code is made to run uncompiled.
_OF_OUR_DOING = ("flex_attention called without",)

_lock = threading.Lock()
_plain = threading.local()  # whether checkpoints are to be passed through
_active: dict[int, Interceptor] = {}
_stance: ExitStack | None = None
_frame: Function | None = None
_function: Any = None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward run there repeats an earlier one."""
    return bool(torch._C._current_graph_task_id() != -1)


def add(interceptor: Interceptor) -> None:
    """An interceptor starts."""
    global _frame, _function
    with _lock:
        if not _active:
            _frame = getattr(checkpoint, _FRAME)
            _function = getattr(checkpoint, _FUNCTION)
            setattr(checkpoint, _FRAME, _remembering_frame)
            setattr(checkpoint, _FUNCTION, _RememberingFunction)
        _active[id(interceptor)] = interceptor
    stay_eager()


def remove(interceptor: Interceptor) -> None:
    """An interceptor ends."""
    global _stance
    with _lock:
        del _active[id(interceptor)]
        if not _active:
            setattr(checkpoint, _FRAME, _frame)
            setattr(checkpoint, _FUNCTION, _function)
            if _stance is not None:
                _stance.close()
                _stance = None


def at_work() -> bool:
    """Whether there is any interceptor."""
    return bool(_active)


def states() -> list[State]:
    """What the interceptors know of the forwards that are running in this thread."""
    running = (interceptor.state for interceptor in list(_active.values()))
    return [state for state in running if state is not None]


def stay_eager() -> None:
    """Make compiled code run as plain Python, which can be seen into. Does nothing unless something uses the
    compiler.
    """
    global _stance
    if _stance is None and (
        "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules
    ):
        with _lock:
            if _stance is None and _active:
                stance = ExitStack()
                stance.enter_context(torch.compiler.set_stance("force_eager"))
                stance.callback(_unfilter, [_ignore(message) for message in _OF_OUR_DOING])
                _stance = stance


def _ignore(message: str) -> object:
    warnings.filterwarnings("ignore", message=message)
    return warnings.filters[0]


def _unfilter(filters: list[object]) -> None:
    """Take back warning filters; another context may already have done so."""
    for added in filters:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def remembering(function: Callable[..., object]) -> Callable[..., object]:
    """The function, made to run under the interceptors that are at work in this thread now, wherever it
    runs later.
    """
    states = [(interceptor, interceptor.state) for interceptor in _active.values() if interceptor.reruns]
    kept = [(owner, list(state.frames), dict(state.counts)) for owner, state in states if state is not None]
    if not kept:
        return function

    def repeat(*args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            for owner, frames, counts in kept:
                stack.enter_context(owner.resume(frames, counts))
            return function(*args, **kwargs)

    return repeat


def _remembering_frame(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    if _frame is None:
        raise RuntimeError("checkpointing was intercepted before interception began")
    return _frame(remembering(function), *args, **kwargs)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """A context in which checkpoints of this thread that would hide the history of their results do not."""
    before, _plain.on = getattr(_plain, "on", False), True
    try:
        yield
    finally:
        _plain.on = before


class _RememberingFunction:
    """Stands for `CheckpointFunction` while an interceptor is at work."""

    @staticmethod
    def apply(function: Callable[..., object], preserve: bool, *args: object) -> object:
        if getattr(_plain, "on", False):
            return function(*args)
        repeat = remembering(function)

        def first_or_again(*inner: object) -> object:
            return (repeat if in_backward() else function)(*inner)

        return _function.apply(first_or_again, preserve, *args)
