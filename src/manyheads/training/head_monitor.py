"""One look at the heads during a training step: entropy, largest logit, twins, gradients, dead heads."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.mask_reading import find_unmasked
from manyheads.capture.proof import ForwardCall
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch
from manyheads.nn.attention import default_scale

# A head whose influence on the loss is below this share of its site's mean is dead.
DEAD = 0.01
# Redundancy is estimated on this many tokens of each call.
TOKENS = 256
MONITORED = ("largest_logit", "redundancy", "twin", "gradient_norm", "gradient_share", "dead")


class HeadMonitor(Watch):
    """Measures the heads of a model in a forward and a backward pass, without changing either by a bit.

    `table` has the statistics of ``watch(model, "logits")`` and, for each head:

    ``largest_logit``: over all queries and keys of the step, not their mean.
    ``redundancy``: the largest linear CKA between its outputs and those of another head of its layer, on 256
    tokens of each call, and ``twin``, which head that is.
    ``gradient_norm``: the norm of the loss's gradient with respect to its output, and ``gradient_share``, its
    part of the sum of squares of all heads of the model.
    ``dead``: 1 if the sum over tokens of |output| |gradient|, which bounds to first order what the loss would
    lose without the head, is under a hundredth of the mean of its layer's heads.

    NaN is what was not seen: the twin of a head alone, the gradients of a step without a backward pass.
    It can be entered again for another look, which is cheaper than the first: the sites are known then.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> with HeadMonitor(model) as monitor:
    ...     model(torch.randint(101, (2, 7))).square().mean().backward()
    >>> round(monitor.table["gradient_share"].sum().item(), 4), len(monitor.table)
    (1.0, 6)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "logits", {}, (), False)
        self.structure = structure(model)  # what it was made for
        self.logits_only = False  # for a look that only the clip needs
        self.forwards: dict[str, ForwardCall] = {}  # what was called, by the path of the module
        self.scales: dict[str, float] = {}  # of each site's scores, NaN where they do not follow the queries
        self.biases: dict[str, float] = {}  # the largest number added to each site's scores, from 0 on
        self.largest: dict[str, Tensor] = {}  # (heads,)
        self.squares: dict[str, Tensor] = {}  # (heads,) of the gradient of each head's output
        self.influence: dict[str, Tensor] = {}  # (heads,) sum over tokens of |output| |gradient|
        self.outputs: dict[str, list[Tensor]] = {}  # (tokens, heads, d_value) of some tokens

    def __enter__(self) -> HeadMonitor:
        for records in (self.forwards, self.biases, self.largest, self.squares, self.influence, self.outputs):
            records.clear()
        for tally in self._tallies.values():
            tally.clear()
        super().__enter__()
        return self

    @property
    def table(self) -> HeadTable:
        """One row for each head, of what was seen since the last time it was entered."""
        self._fingerprint = fingerprint(self.model)  # the weights were other ones at the last look
        table = super().table
        columns: dict[str, list[Tensor]] = {name: [] for name in MONITORED}
        total_squares = sum(float(squares.sum()) for squares in self.squares.values())
        for site in dict.fromkeys(table["site"]):
            no_values = torch.full((table["site"].count(site),), torch.nan)
            squares, influence = self.squares.get(site, no_values), self.influence.get(site, no_values)
            outputs = self.outputs.get(site)
            twin_columns = twins(torch.cat(outputs)) if outputs else (no_values, no_values)
            dead = (influence <= DEAD * influence.mean()).float().where(influence.isfinite(), torch.nan)
            share = squares / total_squares if total_squares else squares * torch.nan
            seen = (self.largest.get(site, no_values), *twin_columns, squares.sqrt(), share, dead)
            for name, values in zip(MONITORED, seen, strict=True):
                columns[name].append(values.cpu())
        sums = dict(table.sums)
        for name, parts in columns.items():
            x = torch.cat(parts).double()
            is_number = ~x.isnan()
            x = x.where(is_number, 0.0)
            sums[name] = torch.stack([is_number.double(), x, x.square()])
        return replace(table, sums=sums)

    def _heard(self, call: Call, metrics: dict[str, Tensor], counted: Tensor) -> None:
        name, output = call.site.name, call.output
        state = self._interceptor.state
        if state is not None and state.forward is not None:
            self.forwards.setdefault(state.forward.path, state.forward)
        if name not in self.scales:
            self.scales[name] = _scale_of(call)
        added = sum(float(x.amax()) for x in call.mask.tensors if x.is_floating_point() and x.numel())
        self.biases[name] = max(self.biases.get(name, 0.0), added)
        if "largest_logit" in metrics:
            hidden = metrics["largest_logit"].masked_fill(~counted, -torch.inf)
            self._raise(self.largest, name, hidden.amax((0, 2)))
        if call.partial or self.logits_only:
            return
        rows = output.detach().transpose(1, 2).flatten(0, 1)  # (tokens, heads, d_value)
        rows = rows[:: max(len(rows) // TOKENS, 1)][:TOKENS]
        self.outputs.setdefault(name, []).append(rows[rows.flatten(1).any(1)])  # padding gives zeros
        if output.requires_grad:
            detached = output.detach()
            output.register_hook(lambda gradient: self._learn(name, detached, gradient))

    def _raise(self, sums: dict[str, Tensor], name: str, values: Tensor) -> None:
        sums[name] = torch.maximum(sums[name], values) if name in sums else values

    def _learn(self, name: str, output: Tensor, gradient: Tensor) -> None:
        exact = torch.promote_types(gradient.dtype, torch.float32)
        sizes = torch.linalg.vector_norm(gradient, dim=-1, dtype=exact)  # (batch, heads, queries)
        lengths = torch.linalg.vector_norm(output, dim=-1, dtype=exact)
        updates = ((self.squares, sizes.square()), (self.influence, sizes * lengths))
        for sums, values in updates:
            total = values.sum((0, 2))
            sums[name] = sums[name] + total if name in sums else total


def _scale_of(call: Call) -> float:
    """The factor between products of queries and keys and the scores; where the model computes these itself,
    from those of one query.
    """
    if call.query is None or call.key is None:
        return math.nan
    if call.scores is None:
        return default_scale(call.query.shape[-1]) if call.scale is None else call.scale
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key[0].repeat_interleave(group, 0)
    products = (call.query[0, :, -1:] @ key.mT).flatten().float()
    keys = call.scores.shape[-1] - call.sinks[1]
    scores = call.scores[0, :, -1:, call.sinks[0] : keys].flatten().float()
    if len(scores) != len(products):
        return math.nan
    seen = find_unmasked(call.scores[0, :, -1:, call.sinks[0] : keys]).flatten()
    x, y = products[seen] - products[seen].mean(), scores[seen] - scores[seen].mean()
    slope = float(x @ y / (x @ x))
    return slope if float((y - slope * x).norm()) <= 0.01 * float(y.norm()) else math.nan


def twins(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The largest linear CKA of each head's outputs with another head's, (heads,), without the bias of few
    tokens (Song et al. 2012), and which head that is; NaN where there is no other head, or too few tokens.

    >>> one = torch.randn(29, 1, 3)
    >>> alike = torch.cat([one, 2 * one + 1, torch.randn(29, 1, 3)], 1)      # (tokens, heads, d_value)
    >>> redundancy, twin = twins(alike)
    >>> redundancy[:2].round(decimals=4), twin[:2]
    (tensor([1., 1.]), tensor([1., 0.]))
    """
    tokens, heads = outputs.shape[:2]
    if heads < 2 or tokens < 4:
        return torch.full((heads,), torch.nan), torch.full((heads,), torch.nan)
    x = outputs.transpose(0, 1)  # (heads, tokens, d_value)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x - x.mean(1, keepdim=True)
    scale = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / scale.where(scale > 0, 1.0)  # so that no square under- or overflows
    products = x @ x.mT
    products.diagonal(dim1=1, dim2=2).zero_()
    sums = products.sum(2)  # (heads, tokens)
    totals = sums.sum(1)
    covariance = products.flatten(1) @ products.flatten(1).T + torch.outer(totals, totals) / (
        (tokens - 1) * (tokens - 2)
    )
    dependence = covariance - 2 / (tokens - 2) * sums @ sums.T  # (heads, heads), up to a factor
    variance = dependence.diagonal().clamp(min=0.0)
    similarity = (dependence / torch.outer(variance, variance).sqrt()).clamp(0.0, 1.0)
    comparable = similarity.isfinite().fill_diagonal_(False)  # a head that always says the same is like none
    redundancy, twin = similarity.where(comparable, -1.0).max(1)
    has_no_twin = redundancy < 0
    return redundancy.masked_fill(has_no_twin, torch.nan).float(), twin.float().masked_fill(
        has_no_twin, torch.nan
    )


def structure(model: nn.Module) -> list[object]:
    """What tells a model from itself after modules were replaced or heads were cut or added in place.

    >>> layer = nn.Linear(3, 2)
    >>> before = structure(layer)
    >>> layer.weight = nn.Parameter(torch.zeros(1, 3))
    >>> structure(layer) == before
    False
    """
    modules = [id(module) for module in model.modules()]
    return [*modules, *(parameter.shape for parameter in model.parameters())]
