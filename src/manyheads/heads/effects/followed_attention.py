"""One input from its ids to the output of one attention, on any model: read by hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyheads.capture.call import Call
from manyheads.capture.call_rows import score_rows, weight_rows

# Attention weights are kept of the first queries and heads only: that many are drawn.
QUERIES, HEADS = 16, 16


@dataclass(frozen=True, eq=False)
class Step:
    """One step of an input on its way through an attention.

    Attributes
    ----------
    name: ``ids``, ``embedding``, ``positions``, ``input``, ``query``, ``key``, ``value``, ``scores``,
        ``weights``, ``heads``, ``joined`` or ``projected``.
    values: (length,) for ids, (length, width), or (heads, length, width) of the first sequence.
    shape: of the whole step; ``values`` may hold the first rows only.
    site: the attention that it belongs to.
    """

    name: str
    values: Tensor
    shape: list[int]
    site: str


class FollowedAttention:
    """A context in which one forward pass is followed through its embeddings and its first attention, or
    through the attention at ``site``.

    It gives the function to call with each attention call.

    >>> from manyheads.capture.interceptor import Interceptor
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=6, heads=2, layers=1, vocabulary=17).eval()
    >>> first = FollowedAttention(model)
    >>> with torch.no_grad(), first as on_call, Interceptor(model, on_call, tokens=True):
    ...     _ = model(torch.randint(17, (1, 5)))
    >>> [(step.name, step.shape) for step in first.steps()]
    [('ids', [5]), ('embedding', [5, 6]), ('positions', [5, 6]), ('input', [5, 6]), ('query', [2, 5, 3]),
     ('key', [2, 5, 3]), ('value', [2, 5, 3]), ('scores', [2, 5, 5]), ('weights', [2, 5, 5]),
     ('heads', [2, 5, 3]), ('joined', [5, 6]), ('projected', [5, 6])]
    """

    def __init__(self, model: nn.Module, site: str | None = None) -> None:
        self._model, self._site = model, site
        self._handles: list[RemovableHandle] = []
        self._embeddings: list[tuple[nn.Module, Tensor, Tensor]] = []  # module, input, output
        self._projections: list[tuple[Tensor, Tensor]] = []  # the last three: input, output
        self._call: Call | None = None
        self._scores: Tensor | None = None
        self._weights: Tensor | None = None
        self._joined: Tensor | None = None
        self._projected: Tensor | None = None

    def __enter__(self) -> Callable[[Call], None]:
        for module in self._model.modules():
            if next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._on_module))
        return self._on_call

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_call(self, call: Call) -> None:
        wanted = self._site in (None, call.site.name)
        if self._call is None and wanted and not call.again and not call.blocked:
            self._call = call
            queries = list(range(min(call.queries, QUERIES)))
            heads = list(range(min(call.site.heads, HEADS)))
            self._weights = weight_rows(call, heads, queries)[0]
            if not call.modified and not call.signed:  # else they are no scores, but logarithms of weights
                left = call.sinks[0]
                self._scores = score_rows(call, heads, queries)[0, ..., left : left + call.keys]
            self._joined = call.output[0].transpose(0, 1).flatten(1)  # (queries, heads * d_value)

    def _on_module(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        with torch._C.DisableTorchFunction():
            if self._call is None:
                if isinstance(module, nn.Embedding) or "position" in type(module).__name__.lower():
                    self._embeddings.append((module, args[0], output.detach()))
                elif getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                    self._projections = [*self._projections[-2:], (args[0].detach(), output.detach())]
            elif self._projected is None and self._joined is not None and self._is_joined(args[0]):
                self._projected = _first_rows(output, len(self._joined))

    def _is_joined(self, value: Tensor) -> bool:
        """Whether the input of a module is the joined heads."""
        joined = self._joined
        assert joined is not None
        if value.shape[-1] != joined.shape[1] or value.dim() > 3:
            return False
        rows = _first_rows(value, len(joined))
        return rows is not None and torch.equal(rows, joined)

    def steps(self) -> list[Step] | None:
        """The steps that could be read, in their order; None when the token ids are unknown."""
        call = self._call
        if call is None or call.tokens is None:
            return None
        ids = call.tokens[0]
        values: dict[str, Tensor | None] = {"ids": ids, **self._embedded(ids), "input": self._input(call)}
        values |= {"query": _first(call.query), "key": _first(call.key), "value": call.value[0]}
        values |= {"scores": self._scores, "weights": self._weights, "heads": call.output[0]}
        values |= {"joined": self._joined, "projected": self._projected}
        shapes = {name: [call.site.heads, call.queries, call.keys] for name in ("scores", "weights")}
        return [
            Step(name, value, shapes.get(name, list(value.shape)), call.site.name)
            for name, value in values.items()
            if value is not None
        ]

    def _input(self, call: Call) -> Tensor | None:
        """The input of the projection that gave the values (one of three, or one for all); None if unseen."""
        values = call.value[0, :, 0].flatten()
        width = len(values)
        for pair in self._projections:
            read, written = (_first_rows(x, call.queries) for x in pair)
            if read is None or written is None:
                continue
            starts = range(0, written.shape[1] - width + 1, max(1, call.value.shape[-1]))
            if any(torch.equal(written[0, i : i + width], values) for i in starts):
                return read
        return None

    def _embedded(self, ids: Tensor) -> dict[str, Tensor]:
        """The embeddings of the tokens, and of their positions."""
        embedded: dict[str, Tensor] = {}
        for module, value, output in self._embeddings:
            rows = _first_rows(output, len(ids))
            if rows is None:
                continue
            if not value.is_floating_point():
                flat = value.reshape(-1)[-len(ids) :]
                if len(flat) != len(ids):
                    continue
                if torch.equal(flat, ids.to(flat)):
                    embedded.setdefault("embedding", rows)
                elif len(ids) > 1 and bool((flat.diff() == 1).all()):
                    embedded.setdefault("positions", rows)
            elif value.shape == output.shape:  # it adds them
                added = _first_rows(output - value, len(ids))
                if added is not None and bool(added.any()):
                    embedded.setdefault("positions", added)
            elif not isinstance(module, nn.Embedding):
                embedded.setdefault("positions", rows)
        return {name: embedded[name] for name in ("embedding", "positions") if name in embedded}


def _first_rows(value: Tensor, length: int) -> Tensor | None:
    """The rows (length, width) of the first sequence; None if it does not have that many."""
    while value.dim() > 2:
        value = value[0]
    return value if value.dim() == 2 and value.shape[0] == length else None


def _first(value: Tensor | None) -> Tensor | None:
    return None if value is None else value[0]
