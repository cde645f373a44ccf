"""One sentence from its tokens to what the first attention gives, on any model: seen, not computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.call_rows import weight_rows
from manyheads.view.document.packing import short

# So many tokens, columns of a matrix and heads are drawn.
TOKENS, COLUMNS, HEADS = 16, 24, 16


class Follower:
    """A context in which a forward pass is followed through its embeddings and its first attention.

    It gives the function that is to be called with each attention call.

    >>> from manyheads.capture.interceptor import Interceptor
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=6, heads=2, layers=1, vocabulary=17).eval()
    >>> with torch.no_grad(), (follower := Follower(model)) as see, Interceptor(model, see, tokens=True):
    ...     _ = model(torch.randint(17, (1, 5)))
    >>> [(step["step"], step["shape"]) for step in follower.steps([])][1:]
    [('ids', [5]), ('embedding', [5, 6]), ('positions', [5, 6]), ('input', [5, 6]), ('query', [2, 5, 3]),
     ('key', [2, 5, 3]), ('value', [2, 5, 3]), ('weights', [2, 5, 5]), ('heads', [2, 5, 3]),
     ('joined', [5, 6]), ('projected', [5, 6])]
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._embeddings: list[tuple[nn.Module, Tensor, Tensor]] = []  # module, what went in, what came out
        self._made: list[tuple[Tensor, Tensor]] = []  # the last projections: what went in, what came out
        self._call: Call | None = None
        self._weights: Tensor | None = None
        self._joined: Tensor | None = None
        self._projected: Tensor | None = None

    def __enter__(self) -> Callable[[Call], None]:
        for module in self._model.modules():
            if next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._ran))
        return self._see

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _see(self, call: Call) -> None:
        if self._call is None and not call.again and not call.blocked:
            self._call = call
            rows = list(range(min(call.queries, TOKENS)))
            heads = list(range(min(call.site.heads, HEADS)))
            self._weights = weight_rows(call, heads, rows)[0]
            self._joined = call.output[0].transpose(0, 1).flatten(1)  # (queries, heads * d_value)

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        with torch._C.DisableTorchFunction():
            if self._call is None:
                if isinstance(module, nn.Embedding) or "position" in type(module).__name__.lower():
                    self._embeddings.append((module, args[0], output.detach()))
                elif getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                    self._made = [*self._made[-2:], (args[0].detach(), output.detach())]
            elif self._projected is None and self._joined is not None and self._reads(args[0]):
                self._projected = _first(output, len(self._joined))

    def _reads(self, given: Tensor) -> bool:
        """Whether a module was given the joined heads."""
        joined = self._joined
        assert joined is not None
        if given.shape[-1] != joined.shape[1] or given.dim() > 3:
            return False
        rows = _first(given, len(joined))
        return rows is not None and torch.equal(rows, joined)

    def steps(self, tokens: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The steps, each with its shape, and of its values as many as can be drawn; None without ids."""
        call = self._call
        if call is None or call.tokens is None:
            return None
        ids = call.tokens[0]
        values = [token["shown"] for token in tokens[:TOKENS]]
        steps: list[dict[str, Any]] = [{"step": "tokens", "shape": [len(ids)], "values": values}]
        named: dict[str, Tensor | None] = {"ids": ids, **self._embedded(ids), "input": self._input(call)}
        named |= {"query": _of(call.query), "key": _of(call.key), "value": call.value[0]}
        named |= {"weights": self._weights, "heads": call.output[0]}
        named |= {"joined": self._joined, "projected": self._projected}
        shapes = {"weights": [call.site.heads, call.queries, call.keys]}
        for name, found in named.items():
            if found is not None:
                drawn = found[:TOKENS] if name == "ids" else _drawn(found, name == "weights")
                steps.append(
                    {
                        "step": name,
                        "shape": shapes.get(name, list(found.shape)),
                        "values": drawn.tolist() if name == "ids" else short(drawn.float()),
                        "site": call.site.name,
                    }
                )
        return steps

    def _input(self, call: Call) -> Tensor | None:
        """What the projection read that gave the values (one of three, or one for all), if known."""
        values = call.value[0, :, 0].flatten()
        width = len(values)
        for pair in self._made:
            given, made = (_first(x, call.queries) for x in pair)
            if given is None or made is None:
                continue
            starts = range(0, made.shape[1] - width + 1, max(1, call.value.shape[-1]))
            if any(torch.equal(made[0, i : i + width], values) for i in starts):
                return given
        return None

    def _embedded(self, ids: Tensor) -> dict[str, Tensor]:
        """What stands for the tokens, and for their places."""
        found: dict[str, Tensor] = {}
        for module, given, output in self._embeddings:
            rows = _first(output, len(ids))
            if rows is None:
                continue
            if not given.is_floating_point():
                flat = given.reshape(-1)[-len(ids) :]
                if len(flat) != len(ids):
                    continue
                if torch.equal(flat, ids.to(flat)):
                    found.setdefault("embedding", rows)
                elif len(ids) > 1 and bool((flat.diff() == 1).all()):
                    found.setdefault("positions", rows)
            elif given.shape == output.shape:  # it adds them
                added = _first(output - given, len(ids))
                if added is not None and bool(added.any()):
                    found.setdefault("positions", added)
            elif not isinstance(module, nn.Embedding):
                found.setdefault("positions", rows)
        return {name: found[name] for name in ("embedding", "positions") if name in found}


def _first(value: Tensor, length: int) -> Tensor | None:
    """The rows (length, width) of the first sequence; None if it has not as many."""
    while value.dim() > 2:
        value = value[0]
    return value if value.dim() == 2 and value.shape[0] == length else None


def _of(value: Tensor | None) -> Tensor | None:
    return None if value is None else value[0]


def _drawn(value: Tensor, square: bool) -> Tensor:
    value = value[:HEADS] if value.dim() == 3 else value
    return value[..., :TOKENS, : TOKENS if square else COLUMNS]
