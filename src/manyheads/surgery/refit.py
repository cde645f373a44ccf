"""refit: new weights by least squares for the layers of a cut model that write into the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyheads.common.devices import batches_to_device, device_of, for_float64, in_float64, to_device
from manyheads.common.processes import added_up, gathered, process_group, processes, rank
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.nn.orthogonal_rows import constrained, plain
from manyheads.surgery.paused_passes import Pass, Stop, passes
from manyheads.surgery.refit_memory import batches_within

# Tried on held-out sequences, in units of the mean square of what a layer reads.
RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_HELD_OUT = 5  # every fifth sequence

_NO_WRITER = (
    "none of its linear layers writes into a residual stream, as it is, so there is nothing to refit (a norm "
    "may stand between, as in Gemma 2)"
)


@dataclass(frozen=True)
class Fitted:
    """The result for one linear layer.

    Attributes
    ----------
    writer: the name of the layer.
    before, after: the mean square of the stream's error on held-out tokens, as a share of the stream's own
        variance there: with the weights it had, and with those it has now.
    ridge: the strength that was best on held-out tokens; None when no new weights were better than the old.
    rows: how many tokens were fitted.
    note: a warning, such as that the text was short.
    """

    writer: str
    before: float
    after: float
    ridge: float | None
    rows: int
    note: str = ""


def refit(
    small: nn.Module,
    batches: Iterable[Batch],
    *,
    teacher: nn.Module,
    memory: str | int | None = None,
    together: bool = False,
    progress: Progress = no_progress,
) -> list[Fitted]:
    """Refit a cut model, in place, to stay close to the uncut one.

    Layers of a transformer write into the residual stream through linear layers: the output projection of
    attention, the second linear layer of the feed-forward. From the first to the last, each of them gets the
    weights that bring the cut model's stream closest, in least squares over all tokens, to the uncut
    model's stream at the same position. So a layer makes up for the heads that are missing before it, and for
    every deviation in the stream that it is added to.

    All sequences count alike, whatever their length. The normal equations are summed in float64, batch by
    batch. A ridge pulls the weights towards what they were; its strength is the best on every fifth sequence,
    which is held out for that. Where no change improves on those, the weights stay.

    Parameters
    ----------
    small: the cut model, changed in place.
    batches: dicts, tuples or tensors, as the model takes them; plain text is enough. Give a few times as many
        tokens as the widest layer has inputs.
    teacher: the uncut model.
    memory: what may be kept of the batches, in bytes or as ``"2GB"``; half of what is free by default. Where
        all batches need more, some of them are read, and the notes say how many.
    together: the processes of torchrun share the batches. Each of them calls this with the same models and
        batches, and gets the same weights.
    progress: called with how many layers are fitted.

    Returns
    -------
    One `Fitted` for each layer, in the order in which they run.

    See Also
    --------
    cut: makes the smaller model.
    recover: distillation.
    prune: all of it.

    References
    ----------
    He, Zhang, Sun, "Channel pruning for accelerating very deep neural networks" (2017).
    Kwon, Kim, Mahoney, Hassoun, Keutzer, Gholami, "A fast post-training pruning framework for
    transformers" (2022).

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
    if next(constrained(small), None) is not None:
        raise ValueError(
            "small: its heads are kept orthogonal, so that its weights cannot be set; expected plain ones: "
            "call fold_orthogonal(small) first"
        )
    device, teacher = device_of(small), plain(teacher)
    calibration = list(batches_to_device(batches, device))
    names = writers(small, calibration[0])
    calibration, note = batches_within(teacher, calibration, names, memory)
    share = (rank(), processes()) if together else (0, 1)
    numbers = range(share[0], len(calibration), share[1])
    local_batches = [calibration[number] for number in numbers]
    fits: list[Fitted] = []
    with (
        process_group() if together else nullcontext(),
        passes(small, local_batches, names) as students,
        passes(teacher, local_batches, names) as teachers,
    ):
        for number, name in enumerate(names, 1):
            stops = [_advance_to(student, name) for student in students]
            targets = [_advance_to(teacher_pass, name) for teacher_pass in teachers]
            fitted = _fit(
                name, small.get_submodule(name), stops, targets, _Sequences(stops, numbers, together)
            )
            fits.append(replace(fitted, note="; ".join(filter(None, (fitted.note, note)))))
            progress("refit", number, len(names))
    return fits


def writers(model: nn.Module, batch: Batch) -> list[str]:
    """The writers that a pass meets once: a writer that it meets again would change in between."""
    names = [stop.writer for stop in _stops(model, batch) if stop.read is not None]
    once = [name for name in names if names.count(name) == 1]
    if not once:
        raise ValueError(f"small: {_NO_WRITER}; expected a transformer with residual connections")
    return once


def check_refit(model: nn.Module, batch: Batch) -> None:
    """Raise a ValueError, before anything else is done, if a smaller copy of the model could not be refitted.

    >>> check_refit(nn.Linear(3, 5), torch.ones(1, 3))
    Traceback (most recent call last):
    ValueError: refit: none of its linear layers writes into a residual stream, as it is, so there is ...
    """
    batch = to_device(batch, device_of(model))
    if not any(True for _ in _stops(model, batch)):
        raise ValueError(f"refit: {_NO_WRITER}; pass refit=False (--no-refit)")


def batches_to_fit(
    model: nn.Module, batches: Iterable[Batch], calibration: Iterable[Batch] | None, refit: bool
) -> tuple[list[Batch], list[Batch]]:
    """All batches, and those to rank and refit on; raises if there are none, or if no refit is possible.

    >>> batches_to_fit(nn.Linear(3, 5), [torch.ones(1, 3)], [], refit=False)
    Traceback (most recent call last):
    ValueError: calibration: expected at least one, got none
    """
    every = list(batches)
    fitted = every if calibration is None else list(calibration)
    for name, some in (("batches", every), ("calibration", fitted)):
        if not some:
            raise ValueError(f"{name}: expected at least one, got none")
    if refit:
        check_refit(model, fitted[0])
    return every, fitted


def _stops(model: nn.Module, batch: Batch) -> Iterator[Stop]:
    """Where a pass stops; torch's own attention, which lost no heads, shows no layer there."""
    with passes(model, [batch]) as (only,):
        while (stop := only.advance()) is not None:
            yield stop


def _advance_to(paused: Pass, name: str) -> Stop:
    """Let a pass go on to a writer, or to the nn.MultiheadAttention that it was cut from."""
    while (stop := paused.advance()) is not None:
        if stop.writer == name or (stop.read is None and name.startswith(f"{stop.writer}.")):
            return stop
    raise ValueError(
        f"teacher: it never writes at {name!r}, where the cut model does; expected the uncut model"
    )


class _Sums:
    """The normal equations of tokens that were fitted, or of those that were held out."""

    def __init__(self, width: int, d_model: int, device: torch.device) -> None:
        self.squares = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.products = torch.zeros(width, d_model, dtype=torch.float64, device=device)
        self.error = self.variance = self.weight = 0.0
        self.rows = 0

    def add(self, read: Tensor, missing: Tensor, total: Tensor, weights: Tensor) -> None:
        """Add tokens with their weights: the layer's inputs, what the stream lacks, its target."""
        weighted = read * weights
        self.squares += weighted.T @ read
        self.products += weighted.T @ missing
        self.error += (missing.square() * weights).sum().item()
        self.variance += ((total - total.mean(0)).square() * weights).sum().item()
        self.weight += weights.sum().item()
        self.rows += len(read)

    def left(self, change: Tensor) -> float:
        """The squared error that remains after a change of the weights (width, d_model)."""
        explained = 2 * (change * self.products).sum() - (change * (self.squares @ change)).sum()
        return self.error - explained.item()

    def solved(self, ridge: float, constant: bool) -> Tensor:
        """The best change of the weights (width, d_model) under a ridge, from which a constant is exempt."""
        penalty = self.squares.diagonal().mean() * ridge * torch.ones_like(self.squares[0])
        if constant:
            penalty[-1] = 1e-9 * self.weight
        factor = torch.linalg.cholesky(self.squares + penalty.diag())
        return torch.cholesky_solve(self.products, factor)

    def add_processes(self) -> None:
        """Add the sums of all processes."""
        numbers = self.squares.new_tensor([self.error, self.variance, self.weight, self.rows])
        self.squares, self.products, numbers = (added_up(x) for x in (self.squares, self.products, numbers))
        self.error, self.variance, self.weight, rows = numbers.tolist()
        self.rows = int(rows)

    def join(self, other: _Sums) -> None:
        """Add the sums of another."""
        self.squares += other.squares
        self.products += other.products
        self.weight += other.weight


class _Sequences:
    """How the sequences of all batches are counted, also where other processes read some of the batches.

    before: of each batch, how many sequences there are before it.
    hold_out: whether there are enough of them to hold out sequences, and not tokens.
    """

    def __init__(self, stops: list[Stop], numbers: Iterable[int], together: bool) -> None:
        local_entries = [
            (n, len(stop.stream), len(_real(stop))) for n, stop in zip(numbers, stops, strict=True)
        ]
        entries = sorted(
            entry for part in (gathered(local_entries) if together else [local_entries]) for entry in part
        )
        self.hold_out = sum(rows for _, rows, _ in entries) >= 2 * _HELD_OUT
        lengths = [sequences for _, _, sequences in entries]
        before = {n: sum(lengths[:i]) for i, (n, _, _) in enumerate(entries)}
        self.before = [before[n] for n, _, _ in local_entries]
        self.together = together


def _fit(
    name: str, module: nn.Module, stops: list[Stop], targets: list[Stop], sequences: _Sequences
) -> Fitted:
    """Give a layer the weights that bring the stream closest to its target."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    constant = bias is not None
    inputs = weight.shape[1 if isinstance(module, nn.Linear) else 0]
    d_model = weight.numel() // inputs if inputs else len(bias)
    exact = for_float64(weight.device)
    fit_sums, held_sums = (_Sums(inputs + constant, d_model, exact) for _ in range(2))
    for read, missing, total, weights, out in _rows(stops, targets, constant, sequences):
        fit_sums.add(read[~out], missing[~out], total[~out], weights[~out])
        held_sums.add(read[out], missing[out], total[out], weights[out])
    if sequences.together:
        fit_sums.add_processes()
        held_sums.add_processes()
    rows = fit_sums.rows + held_sums.rows
    note = "" if rows >= 2 * inputs else f"little text: {rows} tokens for {inputs} inputs"
    errors = {ridge: held_sums.left(fit_sums.solved(ridge, constant)) for ridge in RIDGES}
    best = min(errors, key=errors.__getitem__)
    scale = max(held_sums.variance, 1e-300)
    before, after = held_sums.error / scale, errors[best] / scale
    if not after < before:
        return Fitted(name, before, before, None, rows, note)
    fit_sums.join(held_sums)
    change = fit_sums.solved(best, constant).to(weight.dtype).to(weight.device)
    with torch.no_grad():
        weight += change[:inputs].T if isinstance(module, nn.Linear) else change[:inputs]
        if constant:
            bias += change[-1]
    return Fitted(name, before, after, best, rows, note)


def _real(stop: Stop) -> Tensor:
    """Which positions are no padding, (batch, length); a row for each where that is unknown."""
    shape, real = stop.stream.shape[:-1], stop.real
    if real is None or shape not in (real.shape, (real.numel(),)):
        size = shape if len(shape) > 1 else (*shape, 1)
        return torch.ones(size, dtype=torch.bool, device=stop.stream.device)
    return real


def _rows(
    stops: list[Stop], targets: list[Stop], constant: bool, sequences: _Sequences
) -> Iterator[tuple[Tensor, ...]]:
    """For each batch, in float64 and without padding: the layer's inputs, what the stream lacks, its target,
    the weights of the tokens, and which of them are held out.
    """
    for stop, target, first_sequence in zip(stops, targets, sequences.before, strict=True):
        assert stop.read is not None
        real = _real(stop)
        batch = len(real)  # the stream may be flat, (batch * length, d_model), as in OPT
        read, total, current = (
            in_float64(x.reshape(*real.shape, x.shape[-1])[real])
            for x in (stop.read, target.stream + target.written, stop.stream + stop.written)
        )
        if constant:
            read = torch.cat([read, read.new_ones(len(read), 1)], 1)
        missing, real = total - current, real.to(read.device)
        device = read.device
        lengths = real.flatten(1).sum(1).clamp(min=1)
        ones = real.new_ones(real.shape, dtype=torch.float64).flatten(1)
        weights = (ones / lengths.unsqueeze(1)).view(real.shape)[real].unsqueeze(1)
        number = (
            torch.arange(first_sequence, first_sequence + batch, device=device)
            .unsqueeze(1)
            .expand(ones.shape)
        )
        sequence = (
            number.reshape(real.shape)[real] if sequences.hold_out else torch.arange(len(read), device=device)
        )
        yield read, missing, total, weights, sequence % _HELD_OUT == _HELD_OUT - 1
