"""The document: all that a page shows about a model, from its table and a small sample of the corpus.

Every part beyond the table's own numbers may fail or be interrupted; it is then null, and a note says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyheads.common.devices import device_of
from manyheads.common.interrupts import Interrupted, interruptible, stop_if_interrupted
from manyheads.common.json_numbers import plain
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.version import __version__
from manyheads.heads.diversity import diversity
from manyheads.heads.importance import importance
from manyheads.heads.observer import moved
from manyheads.heads.roles import roles
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.surgery.silencing_curve import curve
from manyheads.view.document import head_numbers
from manyheads.view.document.examples import Examples, profiles
from manyheads.view.document.packing import Budget, weight
from manyheads.view.document.sample import Sample

VERSION = 1
# Bytes of a document in a report; what is most wanted has its place first.
ROOM = 4_300_000


@dataclass
class About:
    """What a document is about, in words: shown as they are.

    >>> About("MiniLM", "a text", 1222).unit
    'tokens'
    """

    model: str = ""
    corpus: str = ""
    units: int = 0
    unit: str = "tokens"
    groups: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def document(
    table: HeadTable,
    model: nn.Module | None = None,
    sample: Sample | None = None,
    *,
    about: About | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    room: int = ROOM,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """All that a page shows: the numbers of a table; with a model and a sample also what can be seen there.

    Parameters
    ----------
    table: of any kind; what `roles`, `diversity` and `importance` add to one is shown, too.
    model: the model of the table.
    sample: what it reads for the parts that the table does not have; `sample.of_corpus` makes one.
    about: names for the title of the page.
    tokenizer, processor: the model's, for words and pictures.
    room: how many bytes it may take in a report.
    progress: called with what is being measured and how much of it is done.

    Ctrl-C ends the measuring, and what there is by then is in the document.

    Examples
    --------
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> sums = {"entropy": torch.tensor([[4.0, 4.0], [2.0, 8.0], [1.0, 16.0]])}
    >>> made = document(HeadTable(rows, torch.tensor([4.0, 4.0]), sums))
    >>> made["heads"]["metrics"]["entropy"]["mean"], made["examples"]
    ([0.5, 2.0], [])
    """
    about = about or About()
    making = _Making(table, about, progress)
    parts = _of_table(table)
    if model is not None and sample is not None and sample.batches:
        with evaluating(model), interruptible():
            _measured(making, parts, model, sample, tokenizer, processor)
    judged, shown = parts.pop("judged", None), parts.pop("shown", None)
    units = about.units or int(table.tokens.max().item() if len(table) else 0)
    made: dict[str, Any] = {
        "version": VERSION,
        "made": {
            "manyheads": __version__,
            "model": about.model,
            "fingerprint": table.model,
            "corpus": about.corpus,
            "units": units,
            "unit": about.unit,
            "notes": [*doubts_in(table).sentences(), *about.notes, *making.notes],
            "stopped": making.stopped,
        },
        "heads": head_numbers.heads(table, judged),
        "stacks": head_numbers.stacks(table),
        **parts,
        "groups": dict(about.groups),
        "examples": [],
    }
    if shown is not None:
        made["examples"] = shown.fitted(Budget(room - weight(made)))
    return made


# Methods of `importance` that ask the head alone: what they measure, as their tables say it, and their names.
_OF_THE_HEAD_ALONE = {
    "length of the head's output": "output-norm",
    "largest attention weight of a query": "confidence",
    "nothing": "random",
}


def _of_table(table: HeadTable) -> dict[str, Any]:
    """The parts that a table itself has."""
    own: dict[str, HeadTable] = {}
    if "importance" in table.sums:
        measure = next(iter(table.labels.get("measure", [])), "")
        own[_OF_THE_HEAD_ALONE.get(measure, "importance")] = table
    found = head_numbers.importance(own, table)
    for metric, method in (("output_norm", "output-norm"), ("confidence", "confidence")):
        if metric in table.sums:
            found[method] = head_numbers.measured(table, metric)
    return {
        "profiles": None,
        "roles": head_numbers.roles(table, table),
        "importance": found,
        "redundancy": head_numbers.redundancy(table, table),
        "curve": None,
    }


class _Making:
    """One part after the other, until somebody interrupts; what fails is left out, with a note."""

    def __init__(self, table: HeadTable, about: About, progress: Progress) -> None:
        self.table = table
        self.about = about
        self.notes: list[str] = []
        self.stopped = False
        self._progress = progress

    def part(self, name: str, make: Callable[[Progress], Any]) -> Any:
        """What a function makes, or None."""
        if self.stopped:
            return None

        def report(stage: str, done: float, total: float | None) -> None:
            stop_if_interrupted()
            self._progress(name, done, total)

        try:
            report(name, 0, 1)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = make(report)
            self.notes += [f"{name}: {warning.message}" for warning in said if _ours(str(warning.message))]
        except Interrupted:
            self.stopped = True
            self.notes.append(f"{name}: interrupted; it and what would have followed are left out")
            return None
        except Exception as error:  # whatever a strange model does, the rest of the page stands
            why = (str(error).strip().splitlines() or [""])[0][:300]
            self.notes.append(f"{name}: left out ({type(error).__name__}: {why})")
            return None
        self._progress(name, 1, 1)
        return found


def _ours(said: str) -> bool:
    return said.startswith(("diversity:", "roles:", "importance:"))


def _measured(
    making: _Making,
    parts: dict[str, Any],
    model: nn.Module,
    sample: Sample,
    tokenizer: Any,
    processor: Any,
) -> None:
    table = making.table
    place = device_of(model)
    batches = list(moved(sample.batches, place))
    making.notes.append(f"roles, importance, redundancy and the curve are measured on {sample.note}")
    if doubts_in(table).unverified:
        making.notes.append("heads that are not verified are not silenced, neither alone nor in the curve")
    fisher = making.part("importance", lambda progress: importance(model, batches, progress=progress))
    if fisher is not None:
        parts["importance"] = head_numbers.importance({"fisher": fisher}, table) | parts["importance"]
    order = _most_wanted(table, fisher)
    shown = Examples(model, table, order, tokenizer, processor, making.notes)
    making.part("examples", lambda progress: shown.add(sample, place, progress))
    parts["profiles"], parts["shown"] = profiles(shown.seen, table), shown
    judged = making.part(
        "redundancy",
        lambda progress: diversity(model, batches, measures=("attention", "outputs"), progress=progress),
    )
    if judged is not None:
        parts["redundancy"], parts["judged"] = head_numbers.redundancy(judged, table), judged
    found = making.part(
        "roles",
        lambda progress: roles(model, batches, tokenizer=tokenizer, progress=progress),
    )
    if found is not None:
        parts["roles"] = head_numbers.roles(found, table)
    if fisher is not None:
        parts["curve"] = making.part(
            "curve", lambda progress: curve(model, batches[:1], {"fisher": fisher}, progress=progress)
        )
    _one_by_one(parts, shown.changes)


def _most_wanted(table: HeadTable, fisher: HeadTable | None) -> list[int]:
    """The rows of a table, those that matter most first; without importance, those that look narrowest."""
    if fisher is not None:
        value = fisher["importance"][head_numbers.aligned(fisher, table)]
    elif "entropy_normalised" in table.sums:
        value = -table["entropy_normalised"]
    else:
        value = torch.zeros(len(table), dtype=torch.float64)
    order: list[int] = value.nan_to_num(-1e300).argsort(descending=True, stable=True).tolist()
    return order


def _one_by_one(parts: dict[str, Any], changes: Sequence[Sequence[float | None]]) -> None:
    """Leave-one-out as a method of importance: the mean over the examples on which heads were silenced."""
    if not changes:
        return
    values = torch.tensor([[torch.nan if x is None else x for x in one] for one in changes]).double()
    mean = values.nanmean(0)
    error = values.std(0) / len(changes) ** 0.5 if len(changes) > 1 else torch.full_like(mean, torch.nan)
    parts["importance"]["leave-one-out"] = {"mean": plain(mean), "se": plain(error)}
