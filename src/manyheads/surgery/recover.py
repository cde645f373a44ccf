"""recover: a short distillation, in which a cut model learns the outputs of the uncut one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.common.devices import batches_to_device, device_of
from manyheads.common.interrupts import interruptible
from manyheads.common.json_files import parse_json, regular_file
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.common.whole_files import write_whole
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.model_outputs import main_tensor, read_output
from manyheads.heads.observer import Forward, Observer, observed
from manyheads.surgery.refit import writers
from manyheads.surgery.residual_streams import Streams

_FORMAT = "manyheads recovery"
_WARM_UP = 0.1  # of all steps
_KEPT_EVERY = 50  # steps


@dataclass(frozen=True)
class Recovered:
    """The result of a recovery.

    losses: the loss of each step, over all sessions.
    steps: the number of steps that were planned.
    """

    losses: list[float]
    steps: int

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended it early."""
        return len(self.losses) < self.steps


def recover(
    small: nn.Module,
    batches: Iterable[Batch],
    *,
    teacher: nn.Module,
    steps: int = 300,
    learning_rate: float = 1e-4,
    state: str | PathLike[str] | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Recovered:
    """Train a cut model, in place, to give the uncut model's outputs; no labels are needed.

    Logits are compared as distributions, by KL(uncut || cut); hidden states by their directions, one minus
    the cosine of every token plus that of the mean over the sequence. The loss adds the distance
    of the residual stream from the uncut model's after each map that writes into it, as a share of its
    variance, averaged over these maps: so every layer gets a target, not only the last. AdamW, with a short
    warm-up and a cosine decay to zero; no dropout; embedding tables stay as they are.

    Parameters
    ----------
    small: the cut model, changed in place.
    batches: dicts, tuples or tensors; each step takes one, in a shuffled order, over and over. All count
        alike: put the same number of sequences into each, and all sequences count alike, too.
    teacher: the uncut model.
    steps: the number of updates, one batch each.
    learning_rate: the peak.
    state: a ``.safetensors`` file that keeps weights and optimizer every 50 steps, on Ctrl-C and at the end.
        If it exists, training resumes from it: it must come from the same cut model, steps and learning rate.
    seed: of the order of the batches.
    progress: called with how many steps are done.

    Ctrl-C ends the training after the current step; the model keeps what it has learned. A second Ctrl-C
    raises KeyboardInterrupt at once.

    See Also
    --------
    refit: least squares, without training.
    prune: all of it.

    References
    ----------
    Hinton, Vinyals, Dean, "Distilling the knowledge in a neural network" (2015).
    Jiao and others, "TinyBERT: distilling BERT for natural language understanding" (2020).

    Examples
    --------
    >>> import copy
    >>> from manyheads.nn.transformers import Encoder
    >>> _ = torch.manual_seed(0)
    >>> model = Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> small = copy.deepcopy(model)
    >>> _ = small.blocks[0].attention.output.weight.data[:, :4].zero_()             # head 0 is silent
    >>> result = recover(small, [torch.randint(17, (7, 11))], teacher=model, steps=20, learning_rate=1e-2)
    >>> len(result.losses), result.losses[-1] < result.losses[0]
    (20, True)
    """
    if steps < 1:
        raise ValueError(f"steps: got {steps}; expected at least 1")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate: got {learning_rate}; expected a number above 0")
    device = device_of(small)
    training_batches = list(batches_to_device(batches, device))
    tables = {id(p) for m in small.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    learned = {name: p for name, p in small.named_parameters() if id(p) not in tables}
    optimizer = torch.optim.AdamW(learned.values(), lr=learning_rate, weight_decay=0.0)
    saved = _SavedState(state, fingerprint(small), steps, learning_rate)
    losses = saved.load(learned, optimizer)
    shared = _shared_writers(small, teacher, training_batches[0]) if training_batches else []
    ways = Streams(teacher, shared), Streams(small, shared)
    with _prepared(small, learned), observed(teacher) as observer, interruptible() as interrupted:
        for number in range(len(losses), steps):
            if interrupted():
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _schedule(number, steps)
            batch = training_batches[_turn(number, len(training_batches), seed)]
            loss = _distance(small, batch, observer, *ways)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learned.values(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"learning_rate: {learning_rate} is too high: the loss is not finite; choose a lower one"
                )
            if len(losses) % _KEPT_EVERY == 0:
                saved.save(learned, optimizer, losses)
            progress("recover", number + 1, steps)
        saved.save(learned, optimizer, losses)
    return Recovered(losses, steps)


def _shared_writers(small: nn.Module, teacher: nn.Module, batch: Batch) -> list[str]:
    """The maps that write into the stream of both models."""
    maps = {name for name, module in teacher.named_modules() if getattr(module, "weight", None) is not None}
    try:
        return [name for name in writers(small, batch) if name in maps]
    except ValueError:  # there is no stream
        return []


def _distance(
    small: nn.Module, batch: Batch, observer: Observer, teacher_streams: Streams, small_streams: Streams
) -> Tensor:
    """The distance of the cut model's output and residual streams from the uncut model's."""
    with teacher_streams:
        forward = observer.forward(batch)
    with small_streams:
        result = run(small, batch)
    loss = _output_distance(small, forward, result)
    stream_errors = [
        _stream_error(teacher_streams.by_writer[name], stream, forward.real)
        for name, stream in small_streams.by_writer.items()
        if name in teacher_streams.by_writer and teacher_streams.by_writer[name].shape == stream.shape
    ]
    return loss + torch.stack(stream_errors).mean() if stream_errors else loss


def _stream_error(target: Tensor, stream: Tensor, real: Tensor | None) -> Tensor:
    """The squared error of a stream (batch, length, d_model), or (batch * length, d_model), as a share of its
    variance.
    """
    marked = real is not None and target.shape[:-1] in (real.shape, (real.numel(),))
    target, stream = (x.flatten(0, -2).float() for x in (target, stream))
    if real is not None and marked:
        target, stream = target[real.flatten()], stream[real.flatten()]
    variance = (target - target.mean(0)).square().sum().clamp(min=1e-12)
    return (target - stream).square().sum() / variance


def _output_distance(small: nn.Module, forward: Forward, result: object) -> Tensor:
    target, actual = forward.output, read_output(result, small, forward.real)
    if target.real is not None:
        a, b = (output.value[target.real].float().log_softmax(-1) for output in (target, actual))
        return F.kl_div(b, a, reduction="batchmean", log_target=True)
    loss = 1 - F.cosine_similarity(target.value, actual.value).mean()
    tokens, others = main_tensor(forward.result)[1], main_tensor(result)[1]
    if tokens.dim() == 3:
        token_distances = 1 - F.cosine_similarity(tokens, others, dim=-1)  # (batch, length)
        fits = forward.real is not None and forward.real.shape == token_distances.shape
        loss = loss + (token_distances[forward.real] if fits else token_distances).mean()
    return loss


def steps_done(state: str | PathLike[str]) -> int:
    """The number of steps in a state file."""
    return len(_read_state(Path(state))[1])


def _read_state(path: Path) -> tuple[dict[str, str], list[float], dict[str, Tensor]]:
    """The contents of a state file: its metadata, the losses so far, and tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular_file(path, "state"), "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        losses = parse_json(about.get("losses", ""), list[float])
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"state: {path} is damaged ({error}); delete it to start again") from None
    return about, losses, tensors


def _schedule(number: int, steps: int) -> float:
    """The share of the highest learning rate."""
    warm = max(1, round(_WARM_UP * steps))
    if number < warm:
        return (number + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (number - warm) / max(1, steps - warm)))


def _turn(number: int, count: int, seed: int) -> int:
    """The batch for a step: each once per epoch, every epoch in another order."""
    order = list(range(count))
    random.Random(seed * 1_000_003 + number // count).shuffle(order)
    return order[number % count]


@contextmanager
def _prepared(small: nn.Module, learned: dict[str, nn.Parameter]) -> Iterator[None]:
    """A context in which the cut model runs without dropout, and only what is learned has gradients."""
    learned_ids = {id(p) for p in learned.values()}
    with evaluating(small):
        for parameter in small.parameters():
            parameter.requires_grad_(id(parameter) in learned_ids)
        try:
            yield
        finally:
            for parameter in small.parameters():
                parameter.grad = None


class _SavedState:
    """The file that a recovery resumes from, or none."""

    def __init__(
        self, path: str | PathLike[str] | None, model: str, steps: int, learning_rate: float
    ) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.suffix != ".safetensors":
            raise ValueError(f"state: got {self.path.name}; expected a name that ends in .safetensors")
        self.about = {
            "format": _FORMAT,
            "model": model,
            "steps": str(steps),
            "learning_rate": repr(learning_rate),
        }

    def load(self, learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
        """Restore weights and optimizer; returns the losses so far."""
        if self.path is None or not self.path.exists():
            return []
        about, losses, tensors = _read_state(self.path)
        for name, value in self.about.items():
            if about.get(name) != value:
                raise ValueError(
                    f"state: {self.path} is of another recovery: its {name} is {about.get(name)}, here it is "
                    f"{value}; delete it to start again"
                )
        with torch.no_grad():
            for name, parameter in learned.items():
                if f"weight.{name}" not in tensors:  # it never had a gradient
                    continue
                for part in (f"weight.{name}", f"mean.{name}", f"square.{name}"):
                    if part not in tensors or tensors[part].shape != parameter.shape:
                        raise ValueError(f"state: {self.path} is damaged at {part}; delete it to start again")
                parameter.copy_(tensors[f"weight.{name}"])
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(len(losses))),
                    "exp_avg": tensors[f"mean.{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"square.{name}"].to(parameter.device),
                }
        return losses

    def save(
        self, learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, losses: list[float]
    ) -> None:
        """Write everything, atomically."""
        if self.path is None or not losses:
            return
        from safetensors.torch import save

        tensors = {}
        for name, parameter in learned.items():
            moments = optimizer.state.get(parameter)
            if not moments:
                continue
            tensors[f"weight.{name}"] = parameter.detach().contiguous()
            tensors[f"mean.{name}"] = moments["exp_avg"].contiguous()
            tensors[f"square.{name}"] = moments["exp_avg_sq"].contiguous()
        write_whole(self.path, save(tensors, self.about | {"losses": json.dumps(losses)}))
