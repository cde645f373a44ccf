"""Which linear changes of keys and values leave a model's function as it is, found by trying them.

Keys may be turned if queries are turned with them, and values if what reads them is: then scores and outputs
stay. Positions restrict that: rotary ones turn pairs of coordinates, each pair at its frequency, so that only
turns of the same pairs commute with them. A norm over keys may allow none. Nothing here knows the name of a
position encoding: a change is allowed if the module gives the same output after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.capture.weights import Part, Projections
from manyheads.models.changes import get_tensor

_SCALE = 4.0  # by which one coordinate of keys grows, and that of queries shrinks, to see whether it is free


@dataclass(frozen=True)
class Freedom:
    """The linear maps that keys, or values, may be changed by.

    free: coordinates that any matrix may mix.
    pairs: coordinates that may only be turned and scaled together, each pair as one complex number.
    """

    free: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    def random_map(self, width: int, generator: torch.Generator) -> Tensor:
        """A random matrix (width, width) that is allowed. It scales besides turning, as `shared_heads` does:
        a norm over keys lets turns pass and scales not.
        """
        matrix = torch.eye(width, dtype=torch.float64)
        if self.free:
            count = len(self.free)
            turn = torch.linalg.qr(torch.randn(count, count, generator=generator, dtype=torch.float64))[0]
            index = torch.tensor(self.free)
            matrix[index[:, None], index] = turn * _random_scales(count, generator)
        scales = _random_scales(len(self.pairs), generator)
        for (first, second), scale in zip(self.pairs, scales, strict=True):
            angle = 6.28 * torch.rand((), generator=generator, dtype=torch.float64)
            matrix[first, first] = matrix[second, second] = scale * angle.cos()
            matrix[second, first] = scale * angle.sin()
            matrix[first, second] = -scale * angle.sin()
        return matrix

    def bound(self, width: int) -> list[int]:
        """The coordinates that may not be mixed with others."""
        return [coordinate for coordinate in range(width) if coordinate not in self.free]

    def fits(self, width: int) -> bool:
        """Whether it says something about each of that many coordinates, and about no others."""
        return sorted([*self.free, *(c for pair in self.pairs for c in pair)]) == list(range(width))


def _random_scales(count: int, generator: torch.Generator) -> Tensor:
    """Factors (count,) from 1/2 to 2."""
    return 2.0 ** (2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1)


class HeadWeights:
    """The weights of the heads of one site as matrices that can be read and set.

    role: "query", "key", "value" or "output"; rows are the coordinates of a head, columns what it reads or
    writes, and a last one for the bias where there is one.
    """

    def __init__(self, model: nn.Module, projections: Projections) -> None:
        self.model, self.projections = model, projections
        self.groups: dict[int, list[int]] = {}
        for head, key_head in enumerate(projections.site.kv_heads):
            self.groups.setdefault(key_head, []).append(head)

    def plain(self, role: str) -> bool:
        """Whether every head has exactly one product of its own width in this role."""
        width = self.projections.d_key if role in ("query", "key") else self.projections.d_value
        return all(
            len(getattr(head, role)) == 1
            and len(getattr(head, role)[0].indices) == width
            and (role == "output" or len(head.biases.get(role, ())) <= 1)
            for head in self.projections.heads
        )

    def parameter(self, role: str) -> str:
        """The name of the parameter, of the first head."""
        name: str = getattr(self.projections.heads[0], role)[0].parameter
        return name

    def get(self, role: str, head: int) -> Tensor:
        """(width, inputs), or (width, inputs + 1) with the bias, in float64."""
        columns = [self._rows(part) for part in self._parts(role, head)]
        return torch.cat(columns, 1)

    def put(self, role: str, head: int, matrix: Tensor) -> None:
        """Set what `get` gives."""
        start = 0
        for part in self._parts(role, head):
            tensor = get_tensor(self.model, part.parameter)
            index = torch.tensor(part.indices, device=tensor.device)
            shape = [len(index), *tensor.movedim(part.axis, 0).shape[1:]]
            size = max(1, torch.Size(shape[1:]).numel())
            rows = matrix[:, start : start + size].reshape(shape).movedim(0, part.axis)
            start += size
            with torch.no_grad():
                tensor.index_copy_(part.axis, index, rows.to(tensor))

    def _parts(self, role: str, head: int) -> tuple[Part, ...]:
        weights = self.projections.heads[head]
        biases = () if role == "output" else weights.biases.get(role, ())
        parts: tuple[Part, ...] = (*getattr(weights, role), *biases)
        return parts

    def _rows(self, part: Part) -> Tensor:
        tensor = get_tensor(self.model, part.parameter).detach()
        index = torch.tensor(part.indices, device=tensor.device)
        rows = tensor.index_select(part.axis, index).movedim(part.axis, 0)
        return rows.reshape(len(index), -1).double()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context after which the weights are what they were."""
        names = {part.parameter for head in range(len(self.projections.heads)) for role in _ROLES
                 for part in self._parts(role, head)}  # fmt: skip
        before = {name: get_tensor(self.model, name).detach().clone() for name in names}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in before.items():
                    get_tensor(self.model, name).copy_(tensor)


_ROLES = ("query", "key", "value", "output")
_READERS = {"key": "query", "value": "output"}


def freedom(
    weights: HeadWeights, role: str, holds: Callable[[], bool], guess: Freedom | None = None, seed: int = 0
) -> Freedom:
    """How the keys or values of a site may be changed, together with what reads them.

    Parameters
    ----------
    role: "key" or "value".
    holds: whether the module's output is what it was.
    guess: what was found at another site. It saves trying every coordinate.
    """
    if not (weights.plain(role) and weights.plain(_READERS[role])):
        return Freedom()
    width = len(weights.get(role, 0))
    every = Freedom(free=tuple(range(width)))
    if _allowed(weights, role, every, holds, seed):
        return every
    if role == "value":
        return Freedom()
    if guess is not None and guess != every and guess.fits(width):
        bound = guess.bound(width)  # a layer that turns fewer coordinates would allow the guess, and more
        probed = {bound[0], bound[len(bound) // 2], bound[-1]}
        if _allowed(weights, role, guess, holds, seed) and not any(
            _is_free(weights, role, coordinate, holds) for coordinate in probed
        ):
            return guess
    free = tuple(c for c in range(width) if _is_free(weights, role, c, holds))
    bound = Freedom(free).bound(width)
    half = len(bound) // 2
    layouts = [
        tuple(zip(bound[:half], bound[half:], strict=False)),
        tuple(zip(bound[::2], bound[1::2], strict=False)),
    ]
    for pairs in layouts if len(bound) % 2 == 0 else ():
        if _allowed(weights, role, Freedom(free, pairs), holds, seed):
            return Freedom(free, pairs)
    return Freedom(free) if free and _allowed(weights, role, Freedom(free), holds, seed) else Freedom()


def _allowed(
    weights: HeadWeights, role: str, candidate: Freedom, holds: Callable[[], bool], seed: int
) -> bool:
    """Whether random maps of this kind, other ones for each key head, leave the output as it is."""
    generator = torch.Generator().manual_seed(seed)
    maps = {
        key_head: candidate.random_map(len(weights.get(role, heads[0])), generator)
        for key_head, heads in weights.groups.items()
    }
    with weights.restored():
        transform_heads(weights, role, maps, {key_head: each.inverse().T for key_head, each in maps.items()})
        return holds()


def _is_free(weights: HeadWeights, role: str, coordinate: int, holds: Callable[[], bool]) -> bool:
    scale = torch.eye(len(weights.get(role, 0)), dtype=torch.float64)
    scale[coordinate, coordinate] = _SCALE
    inverse = scale.inverse()
    with weights.restored():
        transform_heads(
            weights, role, dict.fromkeys(weights.groups, scale), dict.fromkeys(weights.groups, inverse)
        )
        return holds()


def transform_heads(
    weights: HeadWeights, role: str, matrices: dict[int, Tensor], reading: dict[int, Tensor]
) -> None:
    """Multiply the keys or values of each key head, and what reads them, by a matrix each."""
    for key_head, heads in weights.groups.items():
        weights.put(role, heads[0], matrices[key_head].to(_device(weights)) @ weights.get(role, heads[0]))
        for head in heads:
            matrix = reading[key_head].to(_device(weights))
            weights.put(_READERS[role], head, matrix @ weights.get(_READERS[role], head))


def _device(weights: HeadWeights) -> torch.device:
    return get_tensor(weights.model, weights.parameter("key")).device
