"""A cache of the keys and values of earlier tokens: each new token costs one row of attention."""

from __future__ import annotations

import weakref
from copy import deepcopy

import torch
from torch import Tensor, nn


class KVCache:
    """Keys and values of one attention module, growing in place up to ``max_length``.

    Memory is allocated once, at the first use. One cache serves one module: make one for each layer. Where a
    gradient is wanted (outside torch.no_grad), each call copies what is held, as autograd needs.

    Examples
    --------
    >>> cache = KVCache(max_length=10)
    >>> keys, values = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    >>> keys, values = cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    >>> keys.shape, cache.length
    (torch.Size([1, 2, 4, 4]), 4)

    See Also
    --------
    DecoderCache : the caches of all layers of a `Decoder`.
    MultiHeadAttention : takes it as ``cache``.

    References
    ----------
    Shazeer 2019, Fast transformer decoding: one write-head is all you need.
    """

    def __init__(self, max_length: int) -> None:
        if not isinstance(max_length, int) or max_length < 1:
            raise ValueError(f"max_length: expected a whole number of at least 1, got {max_length!r}")
        self.max_length = max_length
        self.length = 0
        self.fixed = False  # filled once, from the memory that cross-attention reads
        self._owner: weakref.ref[nn.Module] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def belongs_to(self, module: nn.Module) -> None:
        """Tie the cache to the module that uses it first; raise if another one uses it."""
        if self._owner is None:
            self._owner = weakref.ref(module)
        elif self._owner() is not module:
            raise ValueError(
                "cache: it holds the keys of another attention module; make one KVCache for each layer"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        """The same keys and values, for whichever module takes the copy: a copy of the model may."""
        copy = KVCache(self.max_length)
        copy.length, copy.fixed = self.length, self.fixed
        copy._keys, copy._values = deepcopy((self._keys, self._values), memo)
        return copy

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (batch, kv_heads, new, d_key) and values; return all that are held, as views."""
        if self.fixed:
            raise ValueError(
                "cache: it was made by remember() and takes no further keys; call reset() to reuse it"
            )
        new = k.shape[2]
        if self.length + new > self.max_length:
            raise ValueError(
                f"cache: {self.length} tokens held and {new} more make {self.length + new}, "
                f"past its max_length of {self.max_length}"
            )
        if self._keys is not None and self._values is not None:
            for name, buffer, x in (("keys", self._keys, k), ("values", self._values, v)):
                expected = (*buffer.shape[:2], new, buffer.shape[3])
                if x.shape != expected or x.dtype != buffer.dtype:
                    raise ValueError(
                        f"cache: it holds {name} of {buffer.dtype} that continue as {tuple(expected)}, "
                        f"got {tuple(x.shape)} of {x.dtype}"
                    )
        tensors = (k, v, self._keys, self._values)
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        extend = self._concatenate if needs_grad else self._write
        self._keys, self._values = extend(self._keys, k), extend(self._values, v)
        self.length += new
        return self.held()

    def _concatenate(self, buffer: Tensor | None, x: Tensor) -> Tensor:
        """What is held, and ``x`` after it, in a tensor of its own, which autograd may keep."""
        return x if buffer is None else torch.cat([buffer.narrow(2, 0, self.length), x], 2)

    def _write(self, buffer: Tensor | None, x: Tensor) -> Tensor:
        """What is held, and ``x`` after it, in memory for ``max_length`` tokens."""
        if buffer is None or buffer.shape[2] < self.max_length or buffer.requires_grad:
            room = x.new_empty(*x.shape[:2], self.max_length, x.shape[3])
            if buffer is not None:
                room.narrow(2, 0, self.length).copy_(buffer.narrow(2, 0, self.length))
            buffer = room
        buffer.narrow(2, self.length, x.shape[2]).copy_(x)
        return buffer

    def held(self) -> tuple[Tensor, Tensor]:
        """All keys (batch, kv_heads, length, d_key) and values held, as views."""
        if self._keys is None or self._values is None:
            raise ValueError("cache: it is empty; run the prompt, or remember() a memory, first")
        return self._keys.narrow(2, 0, self.length), self._values.narrow(2, 0, self.length)

    def reorder(self, rows: Tensor) -> None:
        """Let batch row n continue what row ``rows[n]`` held, as beam search needs."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length}, what the cache holds, got {length}")
        self.length = length

    def reset(self) -> None:
        """Forget everything, the sizes and the owner too."""
        self.__init__(self.max_length)  # type: ignore[misc]
