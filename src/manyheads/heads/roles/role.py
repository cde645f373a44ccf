"""What a role is: where it is looked for, a function that finds its cases, and when it may be claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from manyheads.heads.roles.attention_rows import Rows

# What the model reads while a role is looked for: the user's batches, random tokens that come twice, a long
# text with a key planted in it, or the sentences of a treebank word by word.
Source = Literal["text", "repeated", "planted", "treebank"]
Rule = Callable[[Tensor, Tensor], Tensor]


class Cases(NamedTuple):
    """What a role's function returns, each (batch, heads, rows) or broadcasting to it.

    score: how much the query does what the role says.
    baseline: how much a reader without any knowledge does.
    counted: which queries are a case at all.
    weight: the weight at the place in question, for roles that are judged by the place of the largest one.
    """

    score: Tensor
    baseline: Tensor
    counted: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Role:
    """A role, as `catalogue` declares it.

    claims: what a head is called, and the rule by which. ``{variant}`` in a name is the variant's.
    against: what the baseline is, in a few words.
    cross: whether it has a meaning when queries and keys are different sequences.
    needs: what must be known besides the attention: "tokens", "tokenizer", "values" or "lens".
    """

    name: str
    on: Source
    find: Callable[[Rows], Cases | Mapping[str, Cases]]
    claims: Mapping[str, Rule]
    against: str
    unit: str
    cross: bool
    needs: frozenset[str]

    @property
    def says(self) -> str:
        """What it means, in one line."""
        return (self.find.__doc__ or "").strip().splitlines()[0]


ROLES: dict[str, Role] = {}
Find = Callable[[Rows], Cases] | Callable[[Rows], Mapping[str, Cases]]


def role(
    name: str,
    *,
    on: Source,
    claims: Rule | Mapping[str, Rule],
    against: str,
    unit: str = "queries",
    cross: bool = False,
    needs: Iterable[str] = (),
) -> Callable[[Find], Find]:
    """Add the decorated function to the catalogue. See `Role` for the arguments."""

    def enter(find: Find) -> Find:
        rules = claims if isinstance(claims, Mapping) else {name: claims}
        ROLES[name] = Role(name, on, find, rules, against, unit, cross, frozenset(needs))
        return find

    return enter


def at_least(share: float) -> Rule:
    """The score is at least ``share``, and above its baseline.

    >>> from torch import tensor
    >>> at_least(0.9)(tensor([0.95, 0.8]), tensor([0.1, 0.1]))
    tensor([ True, False])
    """
    return lambda score, baseline: (score >= share) & (score > baseline)


def above_chance(share: float) -> Rule:
    """Of what the baseline leaves to be gained, the score gains at least ``share``.

    >>> from torch import tensor
    >>> above_chance(0.5)(tensor([0.55, 0.7]), tensor([0.0, 0.5]))
    tensor([ True, False])
    """
    return lambda score, baseline: (score - baseline) >= share * (1 - baseline)


def points_more(points: float) -> Rule:
    """The score is better than its baseline by at least ``points``.

    >>> from torch import tensor
    >>> points_more(0.1)(tensor([0.55, 0.55]), tensor([0.4, 0.5]))
    tensor([ True, False])
    """
    return lambda score, baseline: score >= baseline + points


def times_at_most(factor: float) -> Rule:
    """The score is at most ``factor`` times its baseline.

    >>> from torch import tensor
    >>> times_at_most(0.5)(tensor([2.0, 4.0]), tensor([5.0, 5.0]))
    tensor([ True, False])
    """
    return lambda score, baseline: score <= factor * baseline


def times_at_least(factor: float) -> Rule:
    """The score is at least ``factor`` times its baseline.

    >>> from torch import tensor
    >>> times_at_least(0.9)(tensor([2.0, 4.6]), tensor([5.0, 5.0]))
    tensor([False,  True])
    """
    return lambda score, baseline: score >= factor * baseline
