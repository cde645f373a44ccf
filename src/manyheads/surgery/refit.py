"""refit: new weights, by least squares, for the maps of a cut model that write into its stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.progress import Progress, no_progress
from manyheads.heads.observer import moved
from manyheads.surgery.paused_passes import Pass, Stop, passes

# Tried on held-out sequences, in units of the mean square of what a map reads.
RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_HELD_OUT = 5  # every fifth sequence


@dataclass(frozen=True)
class Fitted:
    """What became of one map.

    Attributes
    ----------
    writer: the name of the map.
    before, after: the mean square of the stream's error on held-out tokens, as a share of the stream's own
        variance there: with the weights it had, and with those it has now.
    ridge: the strength that was best on held-out tokens; None when no new weights were better than the old.
    rows: how many tokens were fitted.
    note: what a person should know, such as that the text was short.
    """

    writer: str
    before: float
    after: float
    ridge: float | None
    rows: int
    note: str = ""


def refit(
    small: nn.Module,
    batches: Iterable[Any],
    *,
    teacher: nn.Module,
    progress: Progress = no_progress,
) -> list[Fitted]:
    """Refit a cut model, in place, to stay close to the uncut one.

    Whatever a transformer's layers compute, they write it into the residual stream through a linear map: the
    output projection of attention, the second map of the feed-forward. From the first to the last, each of
    these gets the weights by which the cut model's stream comes closest, in least squares over all tokens, to
    the uncut model's stream at the same place. So a map makes up for the heads missing before it as well
    as for everything that is already off in what it is added to.

    Every sequence counts alike, however long it is. The normal equations are summed up in float64, batch by
    batch. A ridge holds the weights to what they were, as strongly as is best for every fifth sequence, which
    is left out of the sums for that; when no change is an improvement there, the weights stay.

    Parameters
    ----------
    small: the cut model, changed in place.
    batches: dicts, tuples or tensors, as the model takes them; plain text does. A few times as many tokens as
        the widest map has inputs are enough.
    teacher: the uncut model.
    progress: called with how many maps are fitted.

    Returns
    -------
    One `Fitted` for each map, in the order in which they run.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> _ = torch.manual_seed(0)
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> small = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> small.load_state_dict(model.state_dict())
    <All keys matched successfully>
    >>> _ = small.blocks[0].attention.output.weight.data[:, :4].zero_()             # head 0 is silent
    >>> fitted = refit(small, [torch.randint(17, (30, 11))], teacher=model)
    >>> len(fitted), fitted[0].after < fitted[0].before
    (4, True)
    """
    place = device_of(small)
    own = list(moved(batches, place))
    names = writers(small, own[0])
    done: list[Fitted] = []
    with passes(small, own, names) as students, passes(teacher, own, names) as teachers:
        for number, name in enumerate(names, 1):
            stops = [_at(student, name) for student in students]
            wanted = [_at(each, name) for each in teachers]
            done.append(_fit(name, small.get_submodule(name), stops, wanted))
            progress("refit", number, len(names))
    return done


def writers(model: nn.Module, batch: Any) -> list[str]:
    """The writers that a pass meets once: those that it meets again would change behind its back."""
    found: list[str] = []
    with passes(model, [batch]) as (only,):
        while (stop := only.advance()) is not None:
            if stop.read is not None:  # torch's own attention, which lost no heads, shows no map
                found.append(stop.writer)
    once = [name for name in found if found.count(name) == 1]
    if not once:
        raise ValueError(
            "small: none of its linear maps writes into a residual stream, as far as its run shows; there is "
            "nothing to refit"
        )
    return once


def _at(each: Pass, name: str) -> Stop:
    """Let a pass go on to a writer, or to the nn.MultiheadAttention that it was cut from."""
    while (stop := each.advance()) is not None:
        if stop.writer == name or (stop.read is None and name.startswith(f"{stop.writer}.")):
            return stop
    raise ValueError(f"teacher: it never writes at {name!r}, where the cut model does; give the uncut model")


class _Sums:
    """The normal equations of tokens that were fitted, or of those that were held out."""

    def __init__(self, width: int, d_model: int, device: torch.device) -> None:
        self.squares = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.products = torch.zeros(width, d_model, dtype=torch.float64, device=device)
        self.error = self.variance = self.weight = 0.0
        self.rows = 0

    def add(self, read: Tensor, missing: Tensor, total: Tensor, weights: Tensor) -> None:
        """Count tokens, by their weights: what was read, what the stream lacks, what it should be."""
        weighted = read * weights
        self.squares += weighted.T @ read
        self.products += weighted.T @ missing
        self.error += (missing.square() * weights).sum().item()
        self.variance += ((total - total.mean(0)).square() * weights).sum().item()
        self.weight += weights.sum().item()
        self.rows += len(read)

    def left(self, change: Tensor) -> float:
        """The squared error that is left after a change of the weights (width, d_model)."""
        explained = 2 * (change * self.products).sum() - (change * (self.squares @ change)).sum()
        return self.error - explained.item()

    def solved(self, ridge: float, constant: bool) -> Tensor:
        """The change of the weights (width, d_model) that is best under a ridge; a constant is free of it."""
        held = self.squares.diagonal().mean() * ridge * torch.ones_like(self.squares[0])
        if constant:
            held[-1] = 1e-9 * self.weight
        factor = torch.linalg.cholesky(self.squares + held.diag())
        return torch.cholesky_solve(self.products, factor)

    def join(self, other: _Sums) -> None:
        """Count what another counted."""
        self.squares += other.squares
        self.products += other.products
        self.weight += other.weight


def _fit(name: str, module: nn.Module, stops: list[Stop], wanted: list[Stop]) -> Fitted:
    """Give a map the weights by which the stream comes closest to the wanted one."""
    weight: Any = module.weight
    bias: Any = module.bias
    constant = bias is not None
    inputs = weight.shape[1 if isinstance(module, nn.Linear) else 0]
    d_model = weight.numel() // inputs if inputs else len(bias)
    fitted, held = (_Sums(inputs + constant, d_model, weight.device) for _ in range(2))
    for read, missing, total, weights, out in _rows(stops, wanted, constant):
        fitted.add(read[~out], missing[~out], total[~out], weights[~out])
        held.add(read[out], missing[out], total[out], weights[out])
    rows = fitted.rows + held.rows
    note = "" if rows >= 2 * inputs else f"little text: {rows} tokens for {inputs} inputs"
    errors = {ridge: held.left(fitted.solved(ridge, constant)) for ridge in RIDGES}
    best = min(errors, key=errors.__getitem__)
    scale = max(held.variance, 1e-300)
    before, after = held.error / scale, errors[best] / scale
    if not after < before:
        return Fitted(name, before, before, None, rows, note)
    fitted.join(held)
    change = fitted.solved(best, constant).to(weight.dtype)
    with torch.no_grad():
        weight += change[:inputs].T if isinstance(module, nn.Linear) else change[:inputs]
        if constant:
            bias += change[-1]
    return Fitted(name, before, after, best, rows, note)


def _rows(stops: list[Stop], wanted: list[Stop], constant: bool) -> Iterator[tuple[Tensor, ...]]:
    """For each batch, in float64 and without padding: what is read, what the stream lacks, what it should be,
    the weights of the tokens, and which of them are held out.
    """
    many = sum(stop.stream.shape[0] for stop in stops) >= 2 * _HELD_OUT
    before = 0
    for stop, target in zip(stops, wanted, strict=True):
        assert stop.read is not None
        batch, device = stop.stream.shape[0], stop.stream.device
        real = stop.real
        if real is None or real.shape != stop.stream.shape[:-1]:
            real = torch.ones(stop.stream.shape[:-1], dtype=torch.bool, device=device)
        read = stop.read[real].double()
        if constant:
            read = torch.cat([read, read.new_ones(len(read), 1)], 1)
        total = (target.stream + target.written)[real].double()
        missing = total - (stop.stream + stop.written)[real]
        lengths = real.flatten(1).sum(1).clamp(min=1)
        ones = real.new_ones(real.shape, dtype=torch.float64).flatten(1)
        weights = (ones / lengths.unsqueeze(1)).view(real.shape)[real].unsqueeze(1)
        number = torch.arange(before, before + batch, device=device).unsqueeze(1).expand(ones.shape)
        place = number.reshape(real.shape)[real] if many else torch.arange(len(read), device=device)
        before += batch
        yield read, missing, total, weights, place % _HELD_OUT == _HELD_OUT - 1
