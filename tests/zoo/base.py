"""The attention that most modules of the zoo are written after, its truth, and the register of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.zoo.case import Case, Silent, Truth
from torch import Tensor, nn

CASES: dict[str, Callable[[], Case]] = {}


class Attention(nn.Module):
    """Four projections. Subclasses write `forward` in a way of their own; `plain` is the truth.

    The truth of head h: its queries, keys and values are the columns `columns(h)` of the projections, its
    weights are `true_weights`, and `true_join` makes the output of what the heads give.
    """

    heads, width, d_model = 4, 6, 23
    kinds: tuple[str, ...] = ("self",)
    sharp = 2.5
    vague = False
    scattered = False

    def __init__(
        self, heads: int | None = None, width: int | None = None, d_model: int | None = None
    ) -> None:
        super().__init__()
        self.heads, self.width = heads or self.heads, width or self.width
        self.d_model = d_model or self.d_model
        inner = self.heads * self.width
        self.q, self.k, self.v = (nn.Linear(self.d_model, inner) for _ in range(3))
        self.o = nn.Linear(inner, self.d_model)
        self.build()
        with torch.no_grad():
            self.q.weight.mul_(self.sharp)
            self.k.weight.mul_(self.sharp)

    def build(self) -> None:
        """Parameters that a subclass has besides."""

    # what forwards share

    def split(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values (batch, length, heads, width)."""
        return [f(x).view(*x.shape[:-1], self.heads, -1) for f in (self.q, self.k, self.v)]

    def scale(self) -> float:
        return float(self.width**-0.5)

    # the truth

    def columns(self, head: int) -> Tensor:
        return torch.arange(head * self.width, (head + 1) * self.width)

    def part(self, projected: Tensor) -> Tensor:
        """(batch, length, inner) to (batch, heads, length, width)."""
        return torch.stack([projected[..., self.columns(h)] for h in range(self.heads)], 1)

    def true_scores(self, x: Tensor) -> Tensor:
        q, k = self.part(self.q(x)), self.part(self.k(x))
        return (
            torch.stack(
                [
                    torch.stack([a @ b.T for a, b in zip(qs, ks, strict=True)])
                    for qs, ks in zip(q, k, strict=True)
                ]
            )
            * self.scale()
        )

    def true_hidden(self, x: Tensor) -> Tensor | None:
        """True where a key is hidden from a query, a shape that broadcasts to the weights."""
        return None

    def true_weights(self, x: Tensor) -> Tensor:
        scores, hidden = self.true_scores(x), self.true_hidden(x)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        shifted = (scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
        return shifted / shifted.sum(-1, keepdim=True).clamp(min=1e-300)

    def true_values(self, x: Tensor) -> Tensor:
        return self.part(self.v(x))

    def true_join(self, x: Tensor, given: Tensor) -> Tensor:
        """The output of what the heads give (batch, heads, queries, width)."""
        whole = given.new_zeros(given.shape[0], given.shape[2], self.heads * self.width)
        for h in range(self.heads):
            whole[..., self.columns(h)] = given[:, h]
        return self.o(whole)

    def true_counted(self, x: Tensor, weights: Tensor) -> Tensor | None:
        return None

    def true_own(self, weights: Tensor) -> Tensor | None:
        queries, keys = weights.shape[-2:]
        return None if self.kinds == ("cross",) else torch.arange(queries) + keys - queries

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        weights, values = self.true_weights(*args), self.true_values(*args)
        given = torch.stack([weights[:, h] @ values[:, h] for h in range(self.heads)], 1)
        truth = Truth(
            "attn",
            weights,
            self.kinds,
            self.true_own(weights),
            self.true_counted(args[0], weights),
            given.clone(),
            vague=self.vague,
            scattered=self.scattered,
            hidden=self.true_hidden(*args),
        )
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        return self.true_join(args[0], given), [self.finish(truth)]

    def finish(self, truth: Truth) -> Truth:
        """Add what a subclass knows besides."""
        return truth

    def example(self, batch: int, length: int) -> Any:
        """Inputs of this size."""
        return torch.randn(batch, length, self.d_model)


class Net(nn.Module):
    """A model that is one attention module, called `attn`."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attn(*args, **kwargs)


def add(
    theme: str,
    name: str,
    make: Callable[[], nn.Module],
    size: tuple[int, int] = (3, 11),
    longer: tuple[int, int] | None = (2, 90),
    train: bool = False,
    **options: Any,
) -> None:
    """Put a module with `plain` and `example` among the cases; it is made when the case is asked for."""

    def case() -> Case:
        with torch.random.fork_rng():
            torch.manual_seed(sum(map(ord, name)))
            module = make()
            model = Net(module).train(train)
            inputs = module.example(*size)
            more = None if longer is None else module.example(*longer)

        def plain(net: Any, given: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
            return net.attn.plain(given, silent)

        return Case(name, theme, model, inputs, plain, more, **options)

    assert name not in CASES, name
    CASES[name] = case


def zoo(theme: str, name: str, *args: Any, **options: Any) -> Callable[[type], type]:
    """A class decorator: this module is a case."""

    def put(module: type) -> type:
        add(theme, name, module, *args, **options)
        return module

    return put


def cases(names: Iterator[str] | None = None) -> Iterator[Case]:
    """The cases by name, made one after the other."""
    for name in names or CASES:
        yield CASES[name]()
