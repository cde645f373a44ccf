"""How much memory tensors take while some code runs: counted, so that two runs give the same number."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make inside it, in the forward and the backward pass.

    What a kernel uses inside itself is not seen, nor are tensors that were there before.

    Attributes
    ----------
    live: bytes of the tensors that exist now.
    peak: the most there were.

    Examples
    --------
    >>> import torch
    >>> with TensorMemory() as memory:
    ...     a = torch.zeros(1000)
    ...     b = a + 1            # 8000 bytes in all
    ...     del a
    ...     b = b + 1            # and again
    >>> memory.live, memory.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), new=True)
        return out

    def _count(self, storage: UntypedStorage, new: bool) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes() if new else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
