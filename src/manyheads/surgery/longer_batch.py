"""A batch made longer, to check a cut on besides the user's batch.

A number that has nothing to do with heads (a window, a number of buckets, a limit) may equal one that has,
and a short batch does not show which is which. Which axes of a batch are those of sequences is found by
trying: an axis is one if the model still runs when it is longer, and attention then has more queries or
keys.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.common.compare_outputs import seeded_evaluation
from manyheads.common.run_batch import run
from manyheads.common.types import Batch

LENGTH = 257  # the least length of sequences
_WORK = 1e11  # the most parameters times tokens
_MUCH = 5e9  # from this on, one sequence has to do
_MANY = 2**22  # likewise, in scores
_SCORES = 2**25  # the most scores of one attention call
_TRIES = 8

Side = tuple[str, str]  # site, and "queries" or "keys"
Axes = tuple[tuple[int, int], ...]  # (number of a tensor, axis)


@dataclass
class RunLengths:
    """The numbers of queries and keys at each site in a run of a model, and the size of its batch."""

    lengths: dict[Side, int] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    def note(self, call: Call) -> None:
        """Record one call."""
        name = call.site.name
        self.calls += 1
        for side, length in (("queries", call.queries), ("keys", call.keys)):
            self.lengths[name, side] = max(length, self.lengths.get((name, side), 0))
        self.batch[name] = max(call.output.shape[0], self.batch.get(name, 0))
        self.heads[name] = call.site.heads

    def longest(self, sites: Iterable[str]) -> int:
        """The most queries or keys at any of these sites."""
        return max(self.lengths.get((site, side), 0) for site in sites for side in ("queries", "keys"))


@dataclass
class Group:
    """Axes of a batch that have the same length and grow together, and what grows with them.

    sides: with which power of the size they grow: 1 with the size, 2 with its square.
    steps: how many more queries or keys there are for each unit of size.
    looped: so does the number of calls, as in a loop over queries.
    """

    axes: Axes
    size: int
    sides: dict[Side, float]
    steps: dict[Side, float]
    looped: bool


def lengths(model: nn.Module, batch: Batch) -> RunLengths:
    """The lengths of the sequences at each site on a batch.

    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> lengths(layer, (torch.ones(1, 3, 6), torch.ones(1, 5, 6), torch.ones(1, 5, 6))).lengths
    {('', 'queries'): 3, ('', 'keys'): 5}
    """
    seen = RunLengths()

    with seeded_evaluation(model), Interceptor(model, seen.note):
        run(model, batch)
    return seen


def longer(
    model: nn.Module, batch: Batch, seen: RunLengths, wanted: int, enough: int | None = None
) -> tuple[Batch, RunLengths] | None:
    """A batch on which attention is longer than ``wanted``, or as long as the model, memory and time allow,
    and its lengths; None where it cannot be made longer.

    seen: the lengths on the batch itself.
    enough: the length to reach where every query is a separate call, which is slow.

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(2, 5, 6)
    >>> lengthened, seen = longer(layer, (x, x, x), lengths(layer, (x, x, x)), 80)
    >>> [part.shape[1] for part in lengthened], seen.longest([""])
    ([83, 83, 83], 83)
    """
    leaves, spec = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    trial = _Trial(model, leaves, spec, seen, wanted if enough is None else min(enough, wanted))
    groups = list(trial.groups())
    trial.one_row(groups, wanted)
    sizes: dict[Axes, int] = {}
    single_runs: list[tuple[dict[Axes, int], RunLengths]] = []
    for group in groups:
        size, run_lengths = trial.longest(group, trial.affordable(group, wanted))
        if run_lengths is not None:
            sizes[group.axes] = size
            single_runs.append(({group.axes: size}, run_lengths))
    if len(single_runs) > 1:
        joint_run = trial.run(sizes)
        if joint_run is not None:
            return trial.batch(sizes), joint_run
    return (trial.batch(single_runs[0][0]), single_runs[0][1]) if single_runs else None


class _Trial:
    """Runs a model on batches that are longer along some axes."""

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: TreeSpec, seen: RunLengths, enough: int
    ) -> None:
        self.model, self.leaves, self.spec, self.seen, self.enough = model, leaves, spec, seen, enough
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.rows: Axes = ()  # the axes of the batch

    def batch(self, sizes: Mapping[Axes, int]) -> Batch:
        """The batch with these axes at these lengths."""
        generator = torch.Generator().manual_seed(7)
        leaves = list(self.leaves)
        for axes, size in sizes.items():
            for number, axis in axes:
                leaves[number] = _extend(leaves[number], axis, size, generator)
        rebuilt = tree_unflatten(leaves, self.spec)
        if isinstance(rebuilt, dict) and "use_cache" in inspect.signature(self.model.forward).parameters:
            rebuilt.setdefault("use_cache", False)
        return rebuilt  # type: ignore[no-any-return]

    def run(self, sizes: Mapping[Axes, int]) -> RunLengths | None:
        """The lengths on such a batch; None where the model does not run on it."""
        try:
            return lengths(self.model, self.batch(sizes))
        except Exception:  # whatever it is, this is not what the model takes
            return None

    def groups(self) -> Iterator[Group]:
        """The axes of sequences."""
        by_size: dict[int, list[tuple[int, int]]] = {}
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and not leaf.is_nested:
                for axis, size in enumerate(leaf.shape):
                    by_size.setdefault(size, []).append((number, axis))
        grown: set[Side] = set()
        for size, axes in sorted(by_size.items(), reverse=True):
            groups = (group for part in _parts(axes) if (group := self._group(part, size)) is not None)
            longer = [group for group in _until_regular(groups) if not group.sides.keys() <= grown]
            if longer:
                group = next((group for group in longer if not group.looped), longer[0])
                grown |= group.sides.keys()
                yield group

    def _group(self, axes: Axes, size: int) -> Group | None:
        for larger in (2 * size, size + 1):
            seen = self.run({axes: larger})
            if seen is None:
                continue
            before, after = self.seen.lengths, seen.lengths
            sides = {side: after[side] / before[side] for side in before if after.get(side, 0) > before[side]}
            rows = {site: seen.batch.get(site) for site in self.seen.batch}
            if not sides and rows == {site: larger // size * many for site, many in self.seen.batch.items()}:
                self.rows = axes
            if sides and all(rows[site] == self.seen.batch[site] for site, _ in sides):
                powers = {side: math.log(ratio, larger / size) for side, ratio in sides.items()}
                grown = {side: max(power, 0.5) for side, power in powers.items()}
                steps = {side: (after[side] - before[side]) / (larger - size) for side in sides}
                return Group(axes, size, grown, steps, looped=seen.calls > self.seen.calls)
            return None
        return None

    def one_row(self, groups: list[Group], wanted: int) -> None:
        """Keep only the last row of the batch where more rows would be slow."""
        length = max((self.affordable(group, wanted) for group in groups), default=0)
        rows, heads = max(self.seen.batch.values()), max(self.seen.heads.values())
        is_fast = rows * length * self.parameters < _MUCH and rows * heads * length**2 < _MANY
        if not self.rows or is_fast:
            return
        leaves = list(self.leaves)
        for number, axis in self.rows:
            self.leaves[number] = leaves[number].narrow(axis, leaves[number].shape[axis] - 1, 1)
        seen = self.run({})
        if seen is None:
            self.leaves = leaves
        else:
            self.seen = seen

    def affordable(self, group: Group, wanted: int) -> int:
        """The size of a group at which its sites are longer than wanted, within time and memory."""
        sizes = []
        wanted = min(wanted, self.enough) if group.looped else wanted
        for (site, side), power in group.sides.items():
            if power < max(other for (name, _), other in group.sides.items() if name == site):
                continue  # pieces of the queries grow more slowly than the keys they all read
            batch = self.seen.batch[site]
            scores = math.isqrt(_SCORES // (batch * self.seen.heads[site]))
            length = min(wanted, max(min(scores, int(_WORK // (batch * max(self.parameters, 1)))), LENGTH))
            before = self.seen.lengths[site, side]
            by_power = group.size * ((length + 1) / before) ** (1 / power)
            # beside tokens that stay as they are (image patches before a text), growth is in steps
            by_steps = group.size + (length + 1 - before) / group.steps[site, side]
            sizes.append(math.ceil(min(by_power, by_steps)))
        return int(max(sizes))

    def longest(self, group: Group, size: int) -> tuple[int, RunLengths | None]:
        """The largest size up to about this one that the model runs on, and the lengths."""
        multiple = -(-size // group.size) * group.size
        for tried in dict.fromkeys((_prime(size), multiple, 1 << (size - 1).bit_length())):
            seen = self.run({group.axes: tried}) if tried > group.size else None
            if seen is not None:
                return tried, seen
        low, high, best = group.size, size, None
        for _ in range(_TRIES):
            middle = (low + high) // 2
            if middle <= low:
                break
            for tried in (middle, middle // group.size * group.size):
                seen = self.run({group.axes: tried}) if tried > low else None
                if seen is not None:
                    low, best = tried, seen
                    break
            else:
                high = middle
        return low, best


def _until_regular(groups: Iterable[Group]) -> Iterator[Group]:
    """Groups up to the first that makes no more calls. One that does may have the axis of the batch in it,
    where a batch has as many rows as tokens.
    """
    for group in groups:
        yield group
        if not group.looped:
            return


def _parts(axes: list[tuple[int, int]]) -> Iterator[Axes]:
    """Axes of one size that may belong together: all, or those at the same position in each tensor, or all
    but the first axes.
    """
    yield tuple(axes)
    positions = sorted({axis for _, axis in axes}, reverse=True)
    if len(positions) > 1:
        for position in positions:
            yield tuple(each for each in axes if each[1] == position)
        yield tuple(each for each in axes if each[1] != 0)


def _prime(least: int) -> int:
    """The first prime that is not smaller.

    >>> _prime(8), _prime(13)
    (11, 13)
    """
    while any(least % divisor == 0 for divisor in range(2, math.isqrt(least) + 1)):
        least += 1
    return least


def _extend(tensor: Tensor, axis: int, size: int, generator: torch.Generator) -> Tensor:
    """A tensor that is longer along one axis: masks are stretched, positions are counted on, and other values
    are drawn from its own, with some noise.

    >>> _extend(torch.tensor([[1, 1, 1, 0]]), 1, 8, torch.Generator())
    tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    >>> _extend(torch.tensor([[3, 4, 5]]), 1, 6, torch.Generator())
    tensor([[3, 4, 5, 6, 7, 8]])
    """
    before, device = tensor.shape[axis], tensor.device
    stretched = torch.arange(size, device=device) * before // size
    values = set(tensor.unique().tolist()) if not tensor.is_complex() else set()
    if tensor.dtype == torch.bool or values <= {0, 1} or min(values) < -1e4:  # the last are added to scores
        return tensor.index_select(axis, stretched)
    drawn = tensor.index_select(axis, torch.randint(before, (size,), generator=generator).to(device))
    if tensor.is_floating_point():
        noise = torch.randn(drawn.shape, generator=generator).to(device, tensor.dtype)
        return drawn + noise * (tensor.std() / 4 if len(values) > 2 else 1.0)
    if before > 1 and bool((tensor.diff(dim=axis) == 1).all()):
        steps = torch.arange(size, device=device, dtype=tensor.dtype)
        return tensor.narrow(axis, 0, 1) + steps.view(-1, *[1] * (tensor.dim() - axis - 1))
    if len(values) < 3:
        drawn = torch.randint(int(max(values)) + 1, drawn.shape, generator=generator).to(drawn)
    return drawn
