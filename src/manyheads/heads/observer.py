"""Running a model on a batch while its heads are observed, with gradients, or with some heads silenced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible
from manyheads.capture.site import Site, Unverified
from manyheads.common.devices import device_of, for_float64
from manyheads.common.errors import describe_error, first_line, lacks_gradient
from manyheads.common.preserved_state import evaluating
from manyheads.common.quantised import without_gradient
from manyheads.common.run_batch import run
from manyheads.common.sharded_weights import check_all_layers
from manyheads.common.types import Batch
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.model_outputs import Output, read_output
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import labels_of, rows_of


@dataclass(eq=False)
class Forward:
    """One run of a model.

    Attributes
    ----------
    result: what the model returned.
    output: that, read as logits or embeddings.
    real: (batch, queries) of the last attention within one sequence, False for padding; None without any.
    heads: for each site the outputs of its heads, (batch, heads, queries, d_value) each, several where the
        model made its attention in pieces.
    """

    result: object
    output: Output
    real: Tensor | None
    heads: dict[str, list[Tensor]]


class Observer:
    """Observes the heads of a model as it runs. Made by `observed`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = device_of(model)
        parameters = inspect.signature(model.forward).parameters.values()
        self._takes_labels = any(p.name == "labels" or p.kind is p.VAR_KEYWORD for p in parameters)
        self.tokens: dict[str, int] = {}  # queries counted, by site
        self._interceptor = Interceptor(model, self._on_call)
        self.gated_sites: set[str] = set()
        self._gates: Mapping[str, Tensor] | None = None
        self._mark: Callable[[str], None] | None = None
        self._gradients = False
        self._means: Mapping[str, Tensor] | None = None
        self._differentiable: bool | None = None
        self._heads: dict[str, list[Tensor]] = {}
        self._real: Tensor | None = None

    @property
    def sites(self) -> list[Site]:
        """The sites measured so far, in the order of their first call."""
        return self._interceptor.measured

    def forward(
        self, batch: Batch, gradients: bool = False, mark: Callable[[str], None] | None = None
    ) -> Forward:
        """Run the model and see its heads.

        With ``gradients`` the output can be differentiated by them; ``mark`` is called with each site as its
        attention runs.
        """
        if gradients:
            self._check_gradients()
        self._heads, self._real, self._gradients, self._mark = {}, None, gradients, mark
        with torch.set_grad_enabled(gradients):
            result = self._run(batch)
            output = read_output(result, self.model, self._real)
        if not self._heads:
            raise ValueError(
                "model: no attention was seen in it; expected a transformer whose attention is made of torch "
                "functions"
            )
        if gradients and not output.value.requires_grad:
            raise ValueError(
                "model: its output has no gradient (is its forward under torch.no_grad, or quantised?); take "
                "method='leave-one-out', which needs none"
            )
        return Forward(result, output, self._real, self._heads)

    def _check_gradients(self) -> None:
        """Raise where quantised weights let no gradient through: what is left would rank heads wrongly."""
        if self._differentiable is None:
            self._differentiable = True
            path = without_gradient(self.model)
            if path is not None:
                raise ValueError(
                    f"model: the quantised weights of {path!r} let no gradient through; take "
                    "method='leave-one-out', which needs none"
                )

    def gated(
        self,
        batch: Batch,
        gates: Mapping[str, Tensor],
        gradients: bool = False,
        means: Mapping[str, Tensor] | None = None,
    ) -> object:
        """What the model returns when the heads of these sites are multiplied by numbers (heads,); with
        ``means``, {site: (heads, width)}, what a number takes away is filled up with the mean.

        `gated_sites` has those where that happened.
        """
        self._gates, self.gated_sites, self._means = gates, set(), means
        try:
            with torch.set_grad_enabled(gradients):
                return self._run(batch)
        finally:
            self._gates = None

    def check(self, verb: str, unverified: Unverified) -> None:
        """Raise when ``verb`` would silence heads at a site that is not verified."""
        for site in self.sites:
            site.check(verb, unverified)

    def output(self, result: object, full: Forward) -> Output:
        """What the model returned for a batch, read with the padding seen when the full model ran on it."""
        return read_output(result, self.model, full.real)

    def table(self, sums: Mapping[str, Mapping[str, Tensor]], measure: str) -> HeadTable:
        """A table of sums (3, heads) by column and site, whose text column ``measure`` says what they are.

        Sites that were never summed count nothing.
        """
        tokens = [self.tokens.get(site.name, 0) for site in self.sites for _ in range(site.heads)]
        empty = {site.name: torch.zeros(3, site.heads, dtype=torch.float64) for site in self.sites}
        joined = {
            column: torch.cat([by_site.get(name, empty[name]) for name in empty], 1)
            for column, by_site in sums.items()
        }
        rows = rows_of(self.model, self.sites)
        about = {"measure": [measure] * len(rows)} | labels_of(self.sites)
        return HeadTable(rows, torch.tensor(tokens), joined, fingerprint(self.model), labels=about)

    def _run(self, batch: Batch) -> object:
        if isinstance(batch, Mapping) and "labels" in batch and not self._takes_labels:
            batch = {name: item for name, item in batch.items() if name != "labels"}  # they are the loss's
        try:
            return run(self.model, batch)
        except Exception as error:
            raise failed_on(batch, error) from error

    def _on_call(self, call: Call) -> Tensor | None:
        name = call.site.name
        if self._gates is not None:
            if name not in self._gates:
                return None
            self.gated_sites.add(name)
            gate = self._gates[name].to(call.output)
            output = call.output * gate[:, None, None]
            if self._means is None:
                return output
            return output + (self._means[name].to(call.output) * (1 - gate)[:, None])[:, None, :]
        if self._mark is not None:
            self._mark(name)
        self._count(call)
        output = call.output
        if self._gradients and call.opaque and not output.requires_grad and call.value.requires_grad:
            raise ValueError(
                f"model: the kernel of {name!r} has no gradient; take method='leave-one-out', which needs "
                "none"
            )
        if self._gradients and not output.requires_grad:
            output = output.detach().requires_grad_()  # the first layer: nothing before it has a gradient
        self._heads.setdefault(name, []).append(output)
        return output.clone() if self._gradients else None  # a model may change what it gets in place

    def _count(self, call: Call) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            real = update_site(call, visible(call))  # (batch or 1, queries), False for padding
            real = None if real is None else real.expand(call.output.shape[0], -1)
            if not call.site.cross:
                self._real = real
            queries = call.output.shape[0] * call.queries if real is None else int(real.sum())
        if not call.again:
            self.tokens[call.site.name] = self.tokens.get(call.site.name, 0) + queries


@contextmanager
def observed(model: nn.Module) -> Iterator[Observer]:
    """A context in which a model runs in eval mode, its parameters need no gradient, and its heads are
    observed.

    >>> layer = nn.TransformerEncoderLayer(6, nhead=2, dim_feedforward=5, batch_first=True)
    >>> with observed(layer) as observer:
    ...     forward = observer.forward(torch.randn(3, 5, 6), gradients=True)
    >>> forward.output.value.shape, forward.heads["self_attn"][0].shape
    (torch.Size([3, 6]), torch.Size([3, 2, 5, 3]))
    """
    check_all_layers(model)
    observer = Observer(model)
    with evaluating(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with observer._interceptor:
            yield observer


def differentiate(
    value: Tensor, outputs: list[Tensor], weights: Tensor, retain_graph: bool = False
) -> Sequence[Tensor | None]:
    """The gradient of value . weights by each of the outputs; None where it does not depend on one."""
    try:
        return torch.autograd.grad(value, outputs, weights, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:
        if not lacks_gradient(error):
            raise
        raise ValueError(
            f"model: a kernel in it has no gradient ({first_line(error)}); take method='leave-one-out', "
            "which needs none"
        ) from error


def gate_gradients(
    heads: Mapping[str, list[Tensor]], value: Tensor, weights: Tensor, retain_graph: bool = False
) -> dict[str, Tensor]:
    """The gradient of each head's gate, for each sequence: {site: (batch, heads)} in float64.

    A gate g multiplies the head's output o, so d value / d g = sum over tokens of (d value / d o) . o.
    Where a model folds other things into the batch (windows, pieces), sequences cannot be separated, and
    one row (1, heads) is the gradient of a gate for all of them.

    Parameters
    ----------
    heads: the outputs of the heads, from `Observer.forward`.
    value: what is differentiated, with a batch as its first axis.
    weights: shaped like it: the gradient of value . weights is taken.
    retain_graph: keep the graph for another call.
    """
    outputs = [output for pieces in heads.values() for output in pieces]
    gradients = iter(differentiate(value, outputs, weights, retain_graph))
    totals: dict[str, Tensor] = {}
    for site, pieces in heads.items():
        total = torch.zeros(())
        for output in pieces:
            gradient = next(gradients)
            part = torch.zeros_like(output) if gradient is None else gradient * output.detach()
            part = part.to(for_float64(part.device)).sum((2, 3), dtype=torch.float64)
            total = total + (
                part if len(pieces) == 1 and len(part) == len(value) else part.sum(0, keepdim=True)
            )
        totals[site] = total.cpu()
    return totals


@dataclass(eq=False)
class Sums:
    """Count, sum and sum of squares of each head's values, by column and site."""

    by_column: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], column: str = "importance") -> None:
        """Count values {site: (units, heads)}; a unit is a sequence, or a batch."""
        for site, value in values.items():
            value = value.cpu().double()
            parts = torch.stack([torch.ones_like(value).sum(0), value.sum(0), value.pow(2).sum(0)])
            sums = self.by_column.setdefault(column, {})
            sums[site] = sums[site] + parts if site in sums else parts


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name, or by number."""
    if isinstance(batch, Tensor):
        return {"0": batch}
    named = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch)
        if isinstance(batch, tuple | list)
        else ()
    )
    return {str(name): item for name, item in named if isinstance(item, Tensor)}


def failed_on(batch: Batch, error: Exception) -> ValueError:
    """The error to raise when a model cannot run on a batch."""
    return ValueError(
        f"batches: the model failed on one of {shapes(batch)} ({describe_error(error, 300)}); expected what "
        "it can run: other names, shorter sequences, other ids"
    )


def shapes(batch: Batch) -> str:
    """The names and shapes of a batch's tensors, for messages."""
    named = {f"input {name}" if name.isdecimal() else name: x for name, x in tensors(batch).items()}
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items()) or type(batch).__name__
