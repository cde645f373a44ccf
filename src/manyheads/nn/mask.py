"""Which key each query may attend to, as values that compose: ``causal() & padding(lengths)``.

A `Mask` says what is allowed without ever building the (queries, keys) square. Kernels ask it for the
rectangle they are working on, and for the range of keys that a block of queries can reach at all.

Positions are aligned at the end: query i of ``queries`` stands at position ``i + keys - queries``, so that
the last query sees everything under `causal`, with or without a cache of earlier keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Some queries or keys, from start to stop. A slice may hold torch.export's symbolic lengths, a range may not.
Span = range | slice


@dataclass(frozen=True, eq=False)
class Mask:
    """Which key each query may attend to. Made by the functions of `manyheads.mask`, joined with ``&``.

    Examples
    --------
    >>> from manyheads.nn import mask
    >>> (mask.causal() & mask.padding(torch.tensor([3, 2]))).dense(3, 3).int()[1, 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 0]], dtype=torch.int32)

    See Also
    --------
    attention : takes it as ``mask``.
    mask : the functions that make masks: causal, window, chunk, padding, alibi.

    References
    ----------
    Press et al. 2022, Train short, test long: attention with linear biases enables input length
    extrapolation.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    lengths: Tensor | None = None  # (batch,): keys at or past it are hidden
    queries: Tensor | None = None  # (batch,): queries at or past it attend to nothing
    slopes: Tensor | None = None  # (heads,) in float64: adds -slope * |i - j|
    tensors: tuple[Tensor, ...] = ()  # bool: True may attend; float: added

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other, "the right side of &")
        if self.chunk and other.chunk and self.chunk != other.chunk:
            raise ValueError(
                f"masks with different chunks cannot be joined: got {self.chunk} and {other.chunk}"
            )
        if self.slopes is not None and other.slopes is not None:
            raise ValueError("both masks add an ALiBi bias: join at most one alibi()")
        windows = [w for w in (self.window, other.window) if w is not None]
        return Mask(
            causal=self.causal or other.causal,
            window=min(windows) if windows else None,
            chunk=self.chunk or other.chunk,
            lengths=_shorter(self.lengths, other.lengths),
            queries=_shorter(self.queries, other.queries),
            slopes=self.slopes if other.slopes is None else other.slopes,
            tensors=self.tensors + other.tensors,
        )

    def __rand__(self, other: Tensor) -> Mask:
        return as_mask(other, "the left side of &") & self

    @property
    def geometric(self) -> bool:
        """True when only the positions of query and key decide: causal, window, chunk."""
        return (
            self.lengths is None and self.queries is None and self.slopes is None and len(self.tensors) == 0
        )

    @property
    def empty(self) -> bool:
        """True when everything is allowed and nothing is added."""
        return self.geometric and not self.causal and self.window is None and self.chunk is None

    def of_sequence(self, n: int, queries: int, keys: int) -> Mask:
        """What is left of the mask for sequence n of the batch once it is cut to its own queries and keys."""
        shape = range(queries), range(keys), slice(n, n + 1), slice(None)
        tensors = tuple(part_of(tensor, *shape) for tensor in self.tensors)
        return replace(self, lengths=None, queries=None, tensors=tensors)

    def key_range(self, rows: Span, keys: int, offset: int) -> tuple[int, int]:
        """The keys [low, high) outside which no query of ``rows`` can attend, by geometry alone."""
        low, high = self._bounds(rows.start + offset, rows.stop - 1 + offset, keys)
        return min(low, keys), max(min(low, keys), high)

    def open_range(self, rows: Span, keys: int, offset: int) -> tuple[int, int]:
        """The keys [low, high) that every query of ``rows`` may attend to, by geometry alone."""
        low, high = self._bounds(rows.stop - 1 + offset, rows.start + offset, keys)
        return low, max(low, high)

    def _bounds(self, low_of: int, high_of: int, keys: int) -> tuple[int, int]:
        """The lowest key that the query at position ``low_of`` may attend to, and the end of those that the
        query at ``high_of`` may attend to.
        """
        low, high = 0, keys
        if self.causal:
            high = min(high, high_of + 1)
        if self.window is not None:
            low, high = max(low, low_of - self.window + 1), min(high, high_of + self.window)
        if self.chunk is not None:
            low = max(low, low_of // self.chunk * self.chunk)
            high = min(high, (high_of // self.chunk + 1) * self.chunk)
        return low, high

    def rectangle(
        self,
        rows: Span,
        columns: Span,
        offset: int,
        device: torch.device,
        batch: slice = slice(None),
        heads: slice = slice(None),
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What holds for queries ``rows`` and keys ``columns``: (allowed, bias), None where nothing is said.

        Both broadcast to (batch, heads, rows, columns); ``batch`` and ``heads`` choose a part of those axes.
        ``offset`` is the position of query 0. An ALiBi bias is made in ``dtype``, or float32 if that is less.
        """
        allowed = self._geometry(rows, columns, offset, device)
        j = torch.arange(columns.start, columns.stop, device=device)
        if self.lengths is not None:
            allowed = _and(allowed, j < self.lengths[batch].to(device)[:, None, None, None])
        if self.queries is not None:
            i = torch.arange(rows.start, rows.stop, device=device)[:, None]
            allowed = _and(allowed, i < self.queries[batch].to(device)[:, None, None, None])
        bias = None
        if self.slopes is not None:
            i = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
            slopes = self.slopes[heads].to(torch.promote_types(dtype, torch.float32)).to(device)
            bias = -slopes[:, None, None] * (i - j).abs()
        for tensor in self.tensors:
            part = part_of(tensor, rows, columns, batch, heads)
            if part.dtype == torch.bool:
                allowed = _and(allowed, part)
            else:
                bias = part if bias is None else bias + part
        return allowed, bias

    def dense(self, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask as a tensor that broadcasts to (batch, heads, queries, keys); to look at small ones.

        Boolean, or floating (-inf where hidden) when the mask adds a bias.
        """
        device = torch.device(device)
        allowed, bias = self.rectangle(range(queries), range(keys), keys - queries, device)
        if allowed is None:
            allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
        return allowed if bias is None else torch.where(allowed, bias, -torch.inf)

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether a query at position i may attend to the key at position j, by geometry alone.

        >>> Mask(causal=True, window=2).allows(torch.tensor(2), torch.arange(4)).int()
        tensor([0, 1, 1, 0], dtype=torch.int32)
        """
        allowed = j <= i if self.causal else torch.ones_like(i == j)
        if self.window is not None:
            allowed = allowed & ((i - j).abs() < self.window)
        if self.chunk is not None:
            pieces = (torch.div(x, self.chunk, rounding_mode="floor") for x in (i, j))
            allowed = allowed & torch.eq(*pieces)
        return allowed

    def count(
        self, queries: int, keys: int, device: torch.device | str = "cpu", offset: int | None = None
    ) -> Tensor:
        """How many keys each query may attend to, (1 or batch, queries), by geometry and lengths alone.

        ``offset`` is the position of query 0; by default the last query is at the last key.

        >>> Mask(causal=True, window=3).count(5, 5)
        tensor([[1, 2, 3, 3, 3]])
        """
        offset = keys - queries if offset is None else offset
        i = torch.arange(offset, offset + queries, device=device)[None]
        low, high = torch.zeros_like(i), torch.full_like(i, keys)
        if self.lengths is not None:
            high = torch.minimum(high, self.lengths.to(device)[:, None])
        if self.causal:
            high = torch.minimum(high, i + 1)
        if self.window is not None:
            low, high = torch.maximum(low, i - self.window + 1), torch.minimum(high, i + self.window)
        if self.chunk is not None:
            start = torch.div(i, self.chunk, rounding_mode="floor") * self.chunk
            low, high = torch.maximum(low, start), torch.minimum(high, start + self.chunk)
        count = (high - low).clamp(min=0)
        if self.queries is not None:
            count = count * (torch.arange(queries, device=device) < self.queries.to(device)[:, None])
        return count

    def _geometry(self, rows: Span, columns: Span, offset: int, device: torch.device) -> Tensor | None:
        if not self.causal and self.window is None and self.chunk is None:
            return None
        if not torch.compiler.is_compiling():  # comparing symbolic lengths would fix them
            low, high = self.open_range(rows, columns.stop, offset)
            if low <= columns.start and high == columns.stop:
                return None
        i = torch.arange(rows.start + offset, rows.stop + offset, device=device)[:, None]
        return self.allows(i, torch.arange(columns.start, columns.stop, device=device))


_EVERYTHING = Mask()


def causal() -> Mask:
    """Each query attends to its own position and those before it, aligned at the last query and key.

    See Also
    --------
    window, chunk: also restrict how far back.
    padding: for sequences of different lengths.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.

    Examples
    --------
    >>> causal().dense(2, 4).int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    return Mask(causal=True)


def window(size: int) -> Mask:
    """Each query attends to positions less than ``size`` away from its own: ``|i - j| < size``.

    See Also
    --------
    chunk: the same cost, without overlap.
    causal: combine them by ``causal() & window(4)``.

    References
    ----------
    Beltagy, Peters and Cohan 2020, Longformer: the long-document transformer.

    Examples
    --------
    >>> window(2).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    return Mask(window=_at_least_one(size, "window"))


def chunk(size: int) -> Mask:
    """Attention only inside consecutive pieces of ``size`` positions.

    See Also
    --------
    window: positions near the query, across pieces.
    causal: combine them by ``causal() & chunk(4)``.

    References
    ----------
    Child et al. 2019, Generating long sequences with sparse transformers.

    Examples
    --------
    >>> chunk(2).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    return Mask(chunk=_at_least_one(size, "chunk"))


def padding(lengths: Tensor, queries: Tensor | None = None) -> Mask:
    """Hide the keys at or past each sequence's length.

    ``lengths`` is an integer tensor (batch,). Padded queries still attend to the real keys unless their own
    lengths are given as ``queries``: then their output is zero, and sequences are computed without their
    padding, which is what makes padded batches fast. Keep lengths on the CPU for that: reading them back from
    a GPU would make it wait.

    See Also
    --------
    causal: combine them by ``causal() & padding(lengths)``.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.

    Examples
    --------
    >>> lengths = torch.tensor([3, 1])
    >>> padding(lengths).dense(1, 3).int().flatten(1)
    tensor([[1, 1, 1],
            [1, 0, 0]], dtype=torch.int32)
    >>> padding(lengths, queries=lengths).dense(3, 3).int()[1, 0]
    tensor([[1, 0, 0],
            [0, 0, 0],
            [0, 0, 0]], dtype=torch.int32)
    """
    return Mask(
        lengths=_lengths(lengths, "lengths"),
        queries=None if queries is None else _lengths(queries, "queries"),
    )


def alibi(heads: int) -> Mask:
    """Attention with linear biases: ``-slope * |i - j|`` is added, slopes 2^(-8/heads) down to 2^-8.

    For a number of heads that is not a power of two, the slopes of the next lower power are followed by every
    second one of the next higher, as in the paper.

    See Also
    --------
    causal: ``causal() & alibi(heads)`` is what the paper uses.

    References
    ----------
    Press et al. 2022, Train short, test long: attention with linear biases enables input length
    extrapolation.

    Examples
    --------
    >>> alibi(2).dense(1, 3)[:, 0]
    tensor([[-0.1250, -0.0625, -0.0000],
            [-0.0078, -0.0039, -0.0000]])
    """
    _at_least_one(heads, "heads")
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / lower) for h in range(lower)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / lower) for h in range(heads - lower)]
    return Mask(slopes=torch.tensor(slopes, dtype=torch.float64, device="cpu"))


def as_mask(value: Mask | Tensor | None, name: str = "mask") -> Mask:
    """A `Mask` from what a caller may pass: a Mask, a boolean or floating tensor, or None.

    >>> as_mask(torch.tensor([True, False])).dense(1, 2)
    tensor([[[[ True, False]]]])
    """
    if value is None:
        return _EVERYTHING
    if isinstance(value, Mask):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a Mask or a tensor, got {type(value).__name__}")
    if value.dtype != torch.bool and not value.is_floating_point():
        raise TypeError(
            f"{name}: got a tensor of {value.dtype}; give a boolean mask (True may attend, e.g. mask.bool()) "
            "or a floating one that is added to the scores"
        )
    return Mask(tensors=(value,))


def check(mask: Mask, batch: int, heads: int, queries: int, keys: int) -> None:
    """Raise a ValueError that names what does not fit (batch, heads, queries, keys)."""
    target = (batch, heads, queries, keys)
    for tensor in mask.tensors:
        shape = tuple(tensor.shape)
        fits = len(shape) <= 4 and all(
            size in (1, target_size)
            for size, target_size in zip(reversed(shape), reversed(target), strict=False)
        )
        if not fits:
            hint = ""
            if shape == (batch, keys):
                hint = "; a padding mask of (batch, keys) is given as mask[:, None, None, :]"
            elif shape == (batch, queries, keys):
                hint = "; a mask of (batch, queries, keys) is given as mask[:, None]"
            raise ValueError(
                f"mask: shape {shape} does not broadcast to (batch, heads, queries, keys) = {target}{hint}"
            )
    for name, lengths in (("lengths", mask.lengths), ("queries", mask.queries)):
        if lengths is not None and lengths.shape[0] != batch:
            raise ValueError(f"mask {name}: got {lengths.shape[0]} lengths for a batch of {batch}")
    if mask.slopes is not None and mask.slopes.shape[0] != heads:
        raise ValueError(f"mask: alibi was made for {mask.slopes.shape[0]} heads, attention has {heads}")


def _and(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def part_of(tensor: Tensor, rows: Span, columns: Span, batch: slice, heads: slice) -> Tensor:
    """The part of a broadcastable tensor that covers these rows, columns, batch elements and heads."""
    tensor = tensor[(None,) * (4 - tensor.dim())]
    slices = (batch, heads, slice(rows.start, rows.stop), slice(columns.start, columns.stop))
    return tensor[
        tuple(slice(None) if size == 1 else s for size, s in zip(tensor.shape, slices, strict=True))
    ]


def _shorter(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.minimum(a, b.to(a.device))


def _lengths(value: Tensor, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected an integer tensor of shape (batch,), got {got}")
    if value.dim() != 1:
        raise ValueError(f"{name}: expected shape (batch,), got {tuple(value.shape)}")
    return value


def _at_least_one(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value
