"""The heads during training: entropy, redundancy, gradients, and which of them are dead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import watch

# A head whose influence on the loss is below this share of its site's mean is dead.
DEAD = 0.01
# Redundancy is estimated on this many tokens of each call.
TOKENS = 256


class HeadMonitor:
    """The heads in one training step. `table` has the results after the backward pass."""

    def __init__(self) -> None:
        self.statistics: HeadTable | None = None
        self.squares: dict[str, Tensor] = {}  # (heads,) of the gradient of each head's output
        self.influence: dict[str, Tensor] = {}  # (heads,) sum over tokens of |output| |gradient|
        self.outputs: dict[str, list[Tensor]] = {}  # (tokens, heads, d_value) of some tokens

    @property
    def table(self) -> HeadTable:
        """The statistics of `watch`, and the columns redundancy, gradient_norm and dead."""
        if self.statistics is None:
            raise ValueError("monitor: the model did not run inside of `monitor_heads`; run it there first")
        sites = list(dict.fromkeys(self.statistics["site"]))
        heads = [self.statistics["site"].count(site) for site in sites]
        columns: dict[str, list[Tensor]] = {"redundancy": [], "gradient_norm": [], "dead": []}
        for site, count in zip(sites, heads, strict=True):
            nothing = torch.zeros(count)
            columns["redundancy"].append(redundancy(torch.cat(self.outputs[site])))
            columns["gradient_norm"].append(self.squares.get(site, nothing).sqrt())
            influence = self.influence.get(site, nothing)
            columns["dead"].append((influence <= DEAD * influence.mean()).float())
        table = self.statistics
        sums = dict(table.sums)
        for name, values in columns.items():
            x = torch.cat(values).double()
            finite = torch.isfinite(x)  # NaN for a head without others in its layer
            sums[name] = torch.stack([finite.double(), x.nan_to_num(0.0), x.nan_to_num(0.0).square()])
        return replace(table, sums=sums)

    def see(self, call: Call) -> None:
        """Record one attention call, and wait for its gradient."""
        name, output = call.site.name, call.output
        if call.again or call.partial:
            return
        with torch._C.DisableTorchFunction():
            rows = output.detach().transpose(1, 2).flatten(0, 1)  # (tokens, heads, d_value)
            rows = rows[rows.flatten(1).any(1)]  # padding gives zeros
            rows = rows[:: max(len(rows) // TOKENS, 1)][:TOKENS]
            self.outputs.setdefault(name, []).append(rows.cpu())
            if output.requires_grad:
                detached = output.detach()
                output.register_hook(lambda gradient: self._learn(name, detached, gradient))

    def _learn(self, name: str, output: Tensor, gradient: Tensor) -> None:
        exact = torch.promote_types(gradient.dtype, torch.float32)
        sizes = torch.linalg.vector_norm(gradient, dim=-1, dtype=exact)  # (batch, heads, queries)
        lengths = torch.linalg.vector_norm(output, dim=-1, dtype=exact)
        updates = ((self.squares, sizes.square()), (self.influence, sizes * lengths))
        for sums, values in updates:
            total = values.sum((0, 2)).cpu()
            sums[name] = sums[name] + total if name in sums else total


@contextmanager
def monitor_heads(model: nn.Module) -> Iterator[HeadMonitor]:
    """Measure the heads of a model in a forward and a backward pass, without changing either by a bit.

    ``gradient_norm`` is the norm of the loss's gradient with respect to a head's output, ``redundancy`` the
    largest linear CKA between its outputs and those of another head of its layer. A head is ``dead`` if the
    sum over tokens of |output| |gradient|, which bounds to first order what the loss would lose without it,
    is under a hundredth of the mean of its layer's heads.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> with monitor_heads(model) as monitor:
    ...     model(torch.randint(101, (2, 7))).square().mean().backward()
    >>> monitor.table.metrics[-3:], len(monitor.table)
    (['redundancy', 'gradient_norm', 'dead'], 6)
    """
    monitor = HeadMonitor()
    with watch(model) as seen, Interceptor(model, monitor.see):
        yield monitor
    monitor.statistics = seen.table


def redundancy(outputs: Tensor) -> Tensor:
    """The largest linear CKA of each head's outputs with another head's, (heads,), without the bias of few
    tokens (Song et al. 2012); NaN where there is no other head, or too few tokens.

    >>> one = torch.randn(29, 1, 3)
    >>> twins = torch.cat([one, 2 * one + 1, torch.randn(29, 1, 3)], 1)      # (tokens, heads, d_value)
    >>> redundancy(twins)[:2]
    tensor([1., 1.])
    """
    tokens, heads = outputs.shape[:2]
    if heads < 2 or tokens < 4:
        return torch.full((heads,), torch.nan)
    x = outputs.transpose(0, 1).double()  # (heads, tokens, d_value)
    x = x - x.mean(1, keepdim=True)
    products = x @ x.mT
    products.diagonal(dim1=1, dim2=2).zero_()
    sums = products.sum(2)  # (heads, tokens)
    totals = sums.sum(1)
    together = products.flatten(1) @ products.flatten(1).T + torch.outer(totals, totals) / (
        (tokens - 1) * (tokens - 2)
    )
    dependence = together - 2 / (tokens - 2) * sums @ sums.T  # (heads, heads), up to a factor
    variance = dependence.diagonal().clamp(min=0.0)
    similarity = (dependence / torch.outer(variance, variance).sqrt()).clamp(0.0, 1.0)
    return similarity.fill_diagonal_(0.0).amax(1).float()
