"""Which of several processes this one is, as torchrun and accelerate launch set it.

Read from the environment, since `inspect` must run where accelerate is not installed; training and evaluation
use accelerate's PartialState.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
_meetings: list[Any] = []  # the store of all groups of this process
_numbers = itertools.count()


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """The number of processes that share the work."""
    return int(os.environ.get("WORLD_SIZE", 1))


def gathered(item: Item) -> list[Item]:
    """What every process passes, in the order of the processes; the same in each of them.

    >>> gathered(7)
    [7]
    """
    if processes() == 1:
        return [item]
    with process_group():
        return gathered_in_group(item)


def gathered_in_group(item: Item) -> list[Item]:
    """The same in a process group that is there already, whoever began it; without one, only this item.

    >>> gathered_in_group(7)
    [7]
    """
    from torch import distributed  # the command asks for the rank before torch is loaded

    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return [item]
    items: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(items, item)
    return items


def added_up(tensor: Tensor) -> Tensor:
    """The sum of what every process passes; the same in each of them.

    >>> import torch
    >>> added_up(torch.ones(2))
    tensor([1., 1.])
    """
    if processes() == 1:
        return tensor
    from torch import distributed

    with process_group():
        total = tensor.detach().cpu().clone()
        distributed.all_reduce(total)
    return total.to(tensor.device)


@contextmanager
def process_group() -> Iterator[None]:
    """A context in which the processes can talk to each other; one that is there already is used."""
    from torch import distributed

    if processes() == 1 or distributed.is_initialized():
        yield
        return
    # A second group under the names of the first would read addresses at which no process listens any more.
    if not _meetings:
        _meetings.append(next(distributed.rendezvous("env://"))[0])  # type: ignore[attr-defined]
    name = f"manyheads {next(_numbers)}"
    store = distributed.PrefixStore(name, _meetings[0])  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank(), world_size=processes())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def share_one_heap() -> None:
    """Let all threads of this process allocate from one heap: memory that one frees, another uses.

    By default glibc gives threads heaps of their own, each of which keeps what it once needed. A refit has a
    thread for each batch (surgery/paused_passes.py), only one of which runs at a time. Elsewhere than with
    glibc this does nothing.

    >>> share_one_heap()
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX
