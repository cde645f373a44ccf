"""DynamicHeads: cut, reseed, split and add heads while a model trains."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.capture.site import Site
from manyheads.capture.weights import Projections, projections, weights
from manyheads.common.errors import FailedChangeError, first_line
from manyheads.common.processes import gathered_in_group
from manyheads.common.registry import registered
from manyheads.common.types import Batch, JsonObject
from manyheads.surgery.arrangement import Arrangement
from manyheads.surgery.cut import cut
from manyheads.surgery.grow import grow
from manyheads.surgery.in_place import Average, become
from manyheads.surgery.reseed import reseed
from manyheads.surgery.weight_slices import slices
from manyheads.training.bare_model import bare, input_of, plain_forward
from manyheads.training.head_budget import Budget, Unit, budget, joint_heads, units_of
from manyheads.training.head_costs import Loss, cost, losses_without, noise, observe_heads
from manyheads.training.head_decisions import Limits, Moment, decide

BATCHES = 4  # recent batches on which heads are priced
ACTS = 8  # acts after the first one, unless the user says otherwise
YOUNG = 2  # a head that began fewer acts ago is left alone


@dataclass(frozen=True)
class Act:
    """One change of a model.

    Attributes
    ----------
    step: after which update.
    kind: ``cut``, ``reseed``, ``split`` or ``add``; ``none`` for a change that failed, which changed nothing.
    site, layer: where.
    heads: the numbers of the heads then; for ``add`` and ``split`` those that are new.
    reason: in words.
    """

    step: int
    kind: str
    site: str
    layer: int
    heads: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        if self.kind == "none":
            return f"step {self.step}: nothing changed: {self.reason}"
        numbers = ", ".join(map(str, self.heads))
        which = f"layer {self.layer} head{'s' * (len(self.heads) > 1)} {numbers} ({self.site})"
        return f"step {self.step}: {self.kind} {which}: {self.reason}"


class DynamicHeads:
    """Changes the heads of a model in place while it trains, within a budget; the optimiser follows.

    Every few steps, heads are priced on the last batches: by the gradients of their gates, then by the loss
    with them silenced, batch by batch. Heads whose removal costs less than the noise of the training loss are
    cut, and so are the cheapest ones that the budget has no room for. Of heads that stay, the dead ones and
    those that duplicate another are reseeded, in directions orthogonal to those of the others, and have no
    effect at first. Where every head of a site costs well more than the noise, a head is added or split, if
    the budget has room. Several processes make the same decisions.

    Parameters
    ----------
    model: any torch.nn.Module that `cut` takes; not wrapped (for a model behind DistributedDataParallel, pass
        the model and wrap it again whenever `step` returns something).
    optimizer: the one that trains the model's parameters.
    loss: a function of the model and a batch that returns the mean loss; without autocast, in which heads
        cannot be told apart.
    steps: the number of updates of the whole run.
    heads: the number of heads at the end, or as a float the share of those at the start; between ``start``
        and ``end`` the budget changes evenly.
    start, end: the steps of the first and of the last act. Default: after a 20th, and after two fifths of the
        steps, so that there is time to learn with the heads that remain.
    every: steps between acts. Default: an eighth of the time between ``start`` and ``end``.
    seed: of new directions.
    averages: averages of the weights that follow: models (torch's AveragedModel, too), or dicts by name.

    Attributes
    ----------
    acts: every `Act` so far.
    history: ``[(step, {site: heads}), ...]``: the number of heads at the start and after each change.
    head_steps: the sum over steps of the number of heads.

    See Also
    --------
    cut, grow: the same on a copy, in one step.
    prune: remove heads after training.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Evci, Gale, Menick, Castro, Elsen, "Rigging the lottery: making all tickets winners" (2020).

    Examples
    --------
    >>> import manyheads as mh
    >>> import torch
    >>> model = mh.Decoder(12, heads=3, layers=2, vocabulary=97)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> def loss_of(model, ids):
    ...     return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    >>> dynamic = DynamicHeads(model, optimizer, loss_of, steps=12, heads=0.5, start=2, end=8, every=3)
    >>> for _ in range(12):
    ...     ids = torch.randint(97, (5, 11))
    ...     loss = loss_of(model, ids)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     acts = dynamic.step(ids, loss)
    >>> sum(block.attention.heads for block in model.blocks), dynamic.acts[0].kind
    (3, 'cut')
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        steps: int,
        heads: float = 0.5,
        start: int | None = None,
        end: int | None = None,
        every: int | None = None,
        seed: int = 0,
        averages: Sequence[Average] = (),
    ) -> None:
        self.model = bare(model, optimizer)
        self.optimizer, self.loss, self.seed, self.averages = optimizer, loss, seed, list(averages)
        if isinstance(heads, bool) or not isinstance(heads, int | float) or not 0 < heads < float("inf"):
            raise ValueError(
                f"heads: expected a number of heads, or a share above 0 as a float, got {heads!r}"
            )
        self._heads = heads
        self._schedule = _schedule(steps, start, end, every)
        self._batches: deque[Any] = deque(maxlen=BATCHES)
        self._losses: list[float | Tensor] = []  # since the last act
        self._budget: Budget | None = None
        self._most: dict[str, int] = {}
        self._fixed: dict[str, str] = {}  # sites that cannot change, and why
        self._born: dict[str, dict[int, int]] = {}  # site -> original number of a new head -> step
        self._number = 0  # of updates
        self.acts: list[Act] = []
        self.history: list[tuple[int, dict[str, int]]] = []
        self.head_steps = 0

    def step(self, batch: Any, loss: float | Tensor) -> list[Act]:
        """Count an update, after ``optimizer.step()``; returns what was changed after it.

        Parameters
        ----------
        batch: what ``loss`` takes; the last few are kept.
        loss: the training loss of this update.
        """
        self._batches.append(batch)
        acts = self.count(loss, list(self._batches))
        if self._number >= self._schedule[-1]:
            self._batches.clear()
        return acts

    def count(self, loss: float | Tensor, batches: Sequence[Any]) -> list[Act]:
        """As `step`, for a loop that keeps the last batches itself; they are used only if an act is `due`."""
        if self._budget is None:
            self._begin(batches[-1])
        self._number += 1
        if self._number <= self._schedule[-1]:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else float(loss))
        self.head_steps += sum(self.history[-1][1].values())
        if self._number not in self._schedule:
            return []
        first = len(self.acts)
        with plain_forward(self.model):
            self._act(batches)
        self._losses.clear()
        if any(act.kind != "none" for act in self.acts[first:]):
            _forget_graphs()
        return self.acts[first:]

    @property
    def due(self) -> bool:
        """Whether the next update is followed by an act, or is the first one: only then batches are used."""
        return self._budget is None or self._number + 1 in self._schedule

    def state_dict(self) -> JsonObject:
        """Everything but the model, the optimiser and the last batches, as plain data."""
        kept = None if self._budget is None else asdict(self._budget)
        return {
            "number": self._number,
            "losses": [float(loss) for loss in self._losses],
            "budget": kept,
            "most": dict(self._most),
            "fixed": dict(self._fixed),
            "born": {
                site: [[head, step] for head, step in born.items()] for site, born in self._born.items()
            },
            "acts": [{**asdict(act), "heads": list(act.heads)} for act in self.acts],
            "history": [[step, dict(heads)] for step, heads in self.history],
            "head_steps": self.head_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called; model and optimiser must be those of that moment."""
        self._number, self._losses = state["number"], list(state["losses"])
        self._budget = None if state["budget"] is None else Budget(**state["budget"])
        self._most, self._fixed = dict(state["most"]), dict(state["fixed"])
        self._born = {site: dict(born) for site, born in state["born"].items()}
        self.acts = [Act(**{**act, "heads": tuple(act["heads"])}) for act in state["acts"]]
        self.history = [(step, dict(heads)) for step, heads in state["history"]]
        self.head_steps = state["head_steps"]

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw the number of heads by layer over time, as PNG or SVG by the name of the file."""
        registered("view.head_history")(self.history, self.acts, self._number, path)

    def _begin(self, batch: Any) -> None:
        """Find out which heads there are and which can change, before anything is learned with them."""
        with plain_forward(self.model):
            sites = observe_heads(self.model, self.loss, [batch]).sites
            weights_of = projections(self.model, input_of(self.model, self.loss, batch))
        units = units_of(sites)
        for name, of_site in units.items():
            if reason := _obstacle(self.model, sites, weights_of, of_site[0]):
                self._fixed[name] = reason
        if len(self._fixed) == len(units):
            site, reason = next(iter(self._fixed.items()))
            raise ValueError(f"model: none of its heads can be cut; at {site!r}: {reason}")
        for name, of_site in units.items():
            room = 0 if name in self._fixed else _room(self.model, weights_of[name])
            self._most[name] = max(sum(unit.size for unit in of_site), room)
        steps = range(self._schedule[0], self._schedule[-1])
        self._budget = budget(self._heads, units, self._most, self._fixed, steps)
        self.history.append((self._number, _counts(units)))

    def _act(self, batches: Sequence[Any]) -> None:
        """Price the heads, and change what is worth it."""
        assert self._budget is not None
        seen = observe_heads(self.model, self.loss, batches)
        units = units_of(seen.sites)

        def price(chosen: Sequence[Unit]) -> Any:
            return cost(losses_without(self.model, self.loss, batches, joint_heads(chosen)), seen.losses)

        limits = Limits(
            self._budget.at(self._number),
            self._budget.after,
            self._most,
            frozenset(self._fixed),
            self._young(units),
            self._number == self._schedule[-1],
        )
        everywhere = gathered_in_group(noise([float(loss) for loss in self._losses]))
        varies = sum(everywhere) / len(everywhere)
        decisions = decide(Moment(seen, units, limits, varies, price))
        sites, inputs = seen.sites, input_of(self.model, self.loss, batches[-1])
        if decisions.anew:
            self._reseed(decisions.anew, sites, inputs)
        if decisions.cut:
            removed_heads = joint_heads(unit for unit, _ in decisions.cut)
            if self._change(lambda: cut(self.model, removed_heads, inputs)):
                self._note("cut", sites, decisions.cut)
        for unit, kind, reason in decisions.grow:
            self._grow(unit, kind, reason, sites, inputs)
        counts = {name: len(_originals(self.model, name, sites[name].heads)) for name in units}
        if counts != self.history[-1][1]:
            self.history.append((self._number, counts))

    def _change(self, change: Callable[[], nn.Module]) -> bool:
        """Become a changed copy, unless it cannot be made: then nothing changes, in no process."""
        problem, copy = "", None
        try:
            copy = change()
        except (ValueError, FailedChangeError) as error:
            problem = first_line(error)
        problems = [text for text in gathered_in_group(problem) if text]
        if problems or copy is None:
            self.acts.append(Act(self._number, "none", "", -1, (), problems[0]))
            return False
        become(self.model, copy, self.optimizer, self.averages)
        return True

    def _reseed(self, chosen: list[tuple[Unit, str]], sites: Mapping[str, Site], inputs: Batch) -> None:
        heads = joint_heads(unit for unit, _ in chosen)
        try:
            self._start_anew(heads, inputs)
        except ValueError as error:  # a head that shares its readers; in every process alike
            self.acts.append(Act(self._number, "none", "", -1, (), first_line(error)))
            return
        self._note("reseed", sites, chosen)
        for name, numbers in heads.items():
            originals = _originals(self.model, name, sites[name].heads)
            self._born.setdefault(name, {}).update({originals[head]: self._number for head in numbers})

    def _grow(self, unit: Unit, kind: str, reason: str, sites: Mapping[str, Site], inputs: Batch) -> None:
        """Split a unit, or add one beside it; new heads point where no other does."""
        before = {name: _originals(self.model, name, sites[name].heads) for name in unit.sites}
        if kind == "split":
            split_heads: dict[int | str, int | Iterable[int]] = dict(unit.heads.items())
            is_changed = self._change(
                lambda: grow(self.model, split_heads, inputs, how="split", seed=self._draw())
            )
        else:
            counts = dict.fromkeys(unit.sites, unit.size)
            is_changed = self._change(lambda: grow(self.model, counts, inputs, seed=self._draw()))
        if not is_changed:
            return
        new: dict[str, list[int]] = {}
        for name, old in before.items():
            after = _originals(self.model, name, 0)
            new[name] = [head for head, number in enumerate(after) if number not in old]
            self._born.setdefault(name, {}).update({after[head]: self._number for head in new[name]})
        if kind == "add":
            self._start_anew(new, inputs)
        self._note(kind, sites, [(Unit(unit.sites, tuple(new[unit.site])), reason)])

    def _start_anew(self, heads: Mapping[str, list[int]], inputs: Batch) -> None:
        """Draw the directions of heads anew; of several calls of a module, the first has the weights."""
        once = {name: numbers for name, numbers in heads.items() if "#" not in name}
        reseed(
            self.model,
            projections(self.model, inputs),
            once,
            seed=self._draw(),
            optimizer=self.optimizer,
            averages=self.averages,
        )

    def _draw(self) -> int:
        """A seed for each act."""
        return self.seed * 1_000_003 + 1009 * self._number + len(self.acts)

    def _young(self, units: Mapping[str, list[Unit]]) -> frozenset[Unit]:
        """Units with heads that began a short time ago."""
        gap = self._schedule[1] - self._schedule[0] if len(self._schedule) > 1 else 0
        young = set()
        for name, of_site in units.items():
            born = self._born.get(name, {})
            numbers = _originals(self.model, name, sum(unit.size for unit in of_site))
            for unit in of_site:
                ages = [self._number - born.get(numbers[head], -1 - YOUNG * gap) for head in unit.numbers]
                if min(ages) < YOUNG * gap:
                    young.add(unit)
        return frozenset(young)

    def _note(self, kind: str, sites: Mapping[str, Site], chosen: Sequence[tuple[Unit, str]]) -> None:
        for unit, reason in sorted(
            chosen, key=lambda pair: (list(sites).index(pair[0].site), pair[0].numbers)
        ):
            self.acts.append(Act(self._number, kind, unit.site, sites[unit.site].layer, unit.numbers, reason))


def _schedule(steps: int, start: int | None, end: int | None, every: int | None) -> list[int]:
    """The steps after which heads may change.

    >>> _schedule(1000, None, None, None)
    [50, 93, 137, 181, 225, 268, 312, 356, 400]
    >>> _schedule(100, 10, 30, 8)
    [10, 18, 26, 30]
    """
    first = max(steps // 20, 2) if start is None else start
    last = max(steps * 2 // 5, first) if end is None else end
    for name, value, least in (
        ("steps", steps, 1),
        ("start", first, 2),
        ("every", 1 if every is None else every, 1),
    ):
        if not value >= least:
            raise ValueError(f"{name}: expected {least} or more, got {value}")
    if not first <= last <= steps:
        raise ValueError(
            f"start, end: expected steps in order up to {steps}, got {first} and {last}; give others, or "
            "make the run longer"
        )
    if every is None:
        return sorted({first + (last - first) * act // ACTS for act in range(ACTS + 1)})
    return [*range(first, last, every), last]


def _obstacle(
    model: nn.Module, sites: Mapping[str, Site], weights_of: Mapping[str, Projections], unit: Unit
) -> str:
    """Why a unit cannot be cut; nothing if it can."""
    if not sites[unit.site].verified:
        return f"what its heads are could not be proved ({sites[unit.site].reason})"
    if missing := [name for name in unit.sites if name not in weights_of]:
        return f"the weights of {missing[0]!r} were not seen"
    try:
        slices(model, weights_of, Arrangement("cut", sites, removed=unit.heads), {})
    except ValueError as error:
        return str(error).removeprefix("heads: ")
    return ""


def _room(model: nn.Module, of_site: Projections) -> int:
    """How many heads can have queries in directions of their own: the width they read by the width of one."""
    head = of_site.heads[0]
    return weights(model, head.query).shape[1] // (of_site.d_key or 1) if head.query else 0


def _counts(units: Mapping[str, list[Unit]]) -> dict[str, int]:
    return {name: sum(unit.size for unit in of_site) for name, of_site in units.items()}


def _originals(model: nn.Module, site: str, heads: int) -> list[int]:
    """The original numbers of a site's heads."""
    numbers: Mapping[str, list[int]] = getattr(model, "original_heads", None) or {}
    return list(numbers.get(site, range(heads)))


def _forget_graphs() -> None:
    """Compiled graphs hold the old shapes: all of them are made again when they are needed."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
