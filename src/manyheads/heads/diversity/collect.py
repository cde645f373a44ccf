"""One batch through a model, and what its heads did: attention rows, outputs, gradients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call, measuring
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible, without_dead_rows
from manyheads.capture.site import Site
from manyheads.capture.torch_patches import in_backward
from manyheads.common.devices import for_float64
from manyheads.common.run_batch import run, run_heads
from manyheads.common.types import Batch
from manyheads.heads.diversity.attention_distance import attention_rows
from manyheads.heads.observer import failed_on
from manyheads.nn.mask import Mask

# Queries whose mask is read together.
_BLOCK = 256


@dataclass(eq=False)
class CallRecord:
    """One attention call: its queries, attention rows and outputs.

    Attributes
    ----------
    site: where it happened.
    meeting: calls of one batch with the same are about the same queries and keys, so they can be compared.
    tokens: how many queries count.
    places: (tokens,) where in (batch, queries) they stand.
    rows: attention of sampled queries (heads, rows, keys), or None.
    outputs: of the queries that count, (tokens, heads, d_value), or None.
    gate: ones (batch, heads, queries) that the output was multiplied by, or None.
    gradient: by the gate, of the queries that count, (tokens, heads), once it was taken.
    """

    site: Site
    meeting: Hashable
    tokens: int
    places: Tensor
    rows: Tensor | None
    outputs: Tensor | None
    gate: Tensor | None = None
    gradient: Tensor | None = None


class Collector:
    """Sees the heads of a model, batch by batch.

    Parameters
    ----------
    model: any torch.nn.Module, in eval mode.
    rows: how many queries of each batch to sample for their attention; 0 for none.
    outputs: whether to keep the outputs of the heads.
    gates: whether to multiply them by gates that a gradient can be taken by.
    seed: of the sampling.

    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> with Collector(layer, rows=4, outputs=True, gates=False, seed=0) as collector:
    ...     seen, _ = collector.run([torch.randn(3, 5, 6)] * 3)
    >>> seen[0].rows.shape, seen[0].outputs.shape
    (torch.Size([2, 4, 5]), torch.Size([15, 2, 3]))
    """

    def __init__(self, model: nn.Module, *, rows: int, outputs: bool, gates: bool, seed: int) -> None:
        self.model = model
        self.rows, self.outputs, self.gates, self.seed = rows, outputs, gates, seed
        self.padding: Tensor | None = None  # (batch, queries) False for padding, of the last self-attention
        self._interceptor = Interceptor(model, self._on_call, reruns=gates, tokens=True)
        self._batch = 0
        self._seen: list[CallRecord] = []

    def __enter__(self) -> Collector:
        self._interceptor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._interceptor.__exit__(*error)

    @property
    def sites(self) -> list[Site]:
        """The sites measured so far, in the order of their first call."""
        return self._interceptor.measured

    def run(self, batch: Batch, number: int | None = None) -> tuple[list[CallRecord], object]:
        """Run the model on a batch: what its attention calls showed, and, with gates, what it returned.

        Which queries are sampled depends on the number of the batch, by default one after the other.
        """
        self._seen, self.padding = [], None
        self._batch = (self._batch if number is None else number) + 1
        try:
            with torch.set_grad_enabled(self.gates):
                result = run(self.model, batch) if self.gates else run_heads(self.model, batch)
        except Exception as error:
            raise failed_on(batch, error) from error
        seen, self._seen = self._seen, []
        return seen, result

    def _on_call(self, call: Call) -> Tensor | None:
        if in_backward():  # a checkpoint's repetition must do what was done before
            return call.output * _gate(call).unsqueeze(-1) if self._gated(call) else None
        if call.again:
            return None
        with measuring(call), torch.no_grad():
            seen = self._record(call)
        if self._gated(call):
            seen.gate = _gate(call)
        self._seen.append(seen)
        return None if seen.gate is None else call.output * seen.gate.unsqueeze(-1)

    def _gated(self, call: Call) -> bool:
        return self.gates and not call.again and not call.partial

    def _record(self, call: Call) -> CallRecord:
        call = without_dead_rows(call)
        visibility = visible(call)
        real_queries = update_site(call, visibility)  # (batch or 1, queries)
        counted = seeing(call)
        if real_queries is not None:
            counted = counted & real_queries
        if not call.site.cross:
            self.padding = counted
        places = counted.flatten().nonzero().flatten()
        turn = sum(seen.site is call.site for seen in self._seen)  # of a model that loops over pieces
        chosen = self._choose(places, turn)
        tokens = None if call.tokens is None else call.tokens.cpu().numpy().tobytes()
        kind = turn, bool(call.site.cross), visibility.ahead, tuple(counted.shape), call.keys, call.sinks
        rows = outputs = None
        sums = for_float64(call.output.device)  # where they are added up
        if self.rows and len(chosen):
            rows = attention_rows(call, chosen // call.queries, chosen % call.queries).to(sums)
        if self.outputs and not call.partial:
            outputs = call.output.transpose(1, 2).flatten(0, 1)[places].to(sums)
        meeting = *kind, tokens, places.cpu().numpy().tobytes()
        return CallRecord(call.site, meeting, len(places), places, rows, outputs)

    def _choose(self, places: Tensor, turn: int) -> Tensor:
        """A sample of the positions, the same for every site that has the same ones."""
        generator = torch.Generator().manual_seed(hash((self.seed, self._batch, turn)) % 2**63)
        order = torch.randperm(len(places), generator=generator)[: self.rows].sort().values
        return places[order.to(places.device)]


def _gate(call: Call) -> Tensor:
    return torch.ones(
        call.output.shape[:3], dtype=call.output.dtype, device=call.output.device, requires_grad=True
    )


def seeing(call: Call) -> Tensor:
    """Which queries may attend to at least one key: (batch, queries).

    >>> x = torch.zeros(2, 1, 3, 4)
    >>> site = Site("attn", layer=0, heads=1, kv_heads=(0,))
    >>> seeing(Call(site, x, x, x, x, Mask(lengths=torch.tensor([3, 0]))))
    tensor([[ True,  True,  True],
            [False, False, False]])
    """
    shape, device = (call.output.shape[0], call.queries), call.output.device
    if call.scores is not None:
        return (call.scores > -torch.inf).any(-1).any(1)
    mask, keys = call.mask, call.keys
    counted = (mask.count(call.queries, keys, device) > 0).expand(shape)
    if not mask.tensors:
        return counted
    only = Mask(causal=mask.causal, window=mask.window, chunk=mask.chunk, tensors=mask.tensors)
    parts = []
    for start in range(0, call.queries, _BLOCK):
        block = range(start, min(start + _BLOCK, call.queries))
        allowed, bias = only.rectangle(block, range(keys), keys - call.queries, device)
        if bias is not None:
            finite = bias > -torch.inf
            allowed = finite if allowed is None else allowed & finite
        if allowed is not None:
            visible_queries = allowed[(None,) * (4 - allowed.dim())].any(-1).any(1)
            parts.append(visible_queries.expand(shape[0], len(block)))
    return counted & torch.cat(parts, 1) if parts else counted
