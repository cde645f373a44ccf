"""The document: all that a page shows about a model, from its table and a small sample of the corpus.

Every part beyond the table's own numbers may fail or be interrupted; it is then null, and a note says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import manyheads
from manyheads.heads.diversity import diversity
from manyheads.heads.importance import importance
from manyheads.heads.importance.observe import moved
from manyheads.heads.importance.outputs import read
from manyheads.heads.maps import run
from manyheads.heads.roles import roles
from manyheads.heads.sites import Site
from manyheads.heads.table import HeadTable
from manyheads.view.document import numbers
from manyheads.view.document.answers import question
from manyheads.view.document.curve import curve
from manyheads.view.document.example import example, fitted
from manyheads.view.document.packed import Budget, packed, plain
from manyheads.view.document.sample import Sample
from manyheads.view.document.seen import EDGES, Seen
from manyheads.view.document.silenced import silenced
from manyheads.view.document.tokens import visible

VERSION = 1
# Bytes of a document in a report; what is most wanted has its place first.
ROOM = 4_300_000
# Heads are silenced one by one as long as parameters times tokens times heads are below this.
WORK = 4e11
# Long maps are kept exactly of at most so many heads.
LONG_EXACT = 24

Step = Callable[[str, float], None]


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
    step: Step = lambda what, share: None,
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
    step: told what is being measured, and the share of it that is done.

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
    making = _Making(table, about, step)
    parts = _of_table(table)
    if model is not None and sample is not None and sample.batches:
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            _measured(making, parts, model, sample, tokenizer, processor, room)
        finally:
            for module, mode in training.items():
                module.training = mode
    judged = parts.pop("judged", None)
    units = about.units or int(table.tokens.max().item() if len(table) else 0)
    return {
        "version": VERSION,
        "made": {
            "manyheads": manyheads.__version__,
            "model": about.model,
            "fingerprint": table.model,
            "corpus": about.corpus,
            "units": units,
            "unit": about.unit,
            "notes": [*about.notes, *making.notes],
            "stopped": making.stopped,
        },
        "heads": numbers.heads(table, judged),
        "stacks": numbers.stacks(table),
        **parts,
        "groups": dict(about.groups),
    }


def _of_table(table: HeadTable) -> dict[str, Any]:
    """The parts that a table itself has."""
    own: dict[str, HeadTable] = {"importance": table} if "importance" in table.sums else {}
    found = numbers.importance(own, table)
    for metric, method in (("output_norm", "output-norm"), ("confidence", "confidence")):
        if metric in table.sums:
            found[method] = numbers.measured(table, metric)
    return {
        "profiles": None,
        "roles": numbers.roles(table, table),
        "importance": found,
        "redundancy": numbers.redundancy(table, table),
        "curve": None,
        "examples": [],
    }


class _Making:
    """One part after the other, until somebody interrupts; what fails is left out, with a note."""

    def __init__(self, table: HeadTable, about: About, step: Step) -> None:
        self.table = table
        self.about = about
        self.notes: list[str] = []
        self.stopped = False
        self._step = step

    def part(self, name: str, make: Callable[[Callable[[float], None]], Any]) -> Any:
        """What a function makes, or None."""
        if self.stopped:
            return None
        self._step(name, 0.0)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = make(partial(self._step, name))
            self.notes += [f"{name}: {warning.message}" for warning in said if _ours(str(warning.message))]
        except KeyboardInterrupt:
            self.stopped = True
            self.notes.append(f"{name}: interrupted; it and what would have followed are left out")
            return None
        except Exception as error:  # whatever a strange model does, the rest of the page stands
            why = (str(error).strip().splitlines() or [""])[0][:300]
            self.notes.append(f"{name}: left out ({type(error).__name__}: {why})")
            return None
        self._step(name, 1.0)
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
    room: int,
) -> None:
    table = making.table
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = list(moved(sample.batches, place))
    making.notes.append(f"roles, importance, redundancy and the curve are measured on {sample.note}")
    fisher = making.part("importance", lambda step: importance(model, batches, step=_of(step, len(batches))))
    if fisher is not None:
        parts["importance"] = numbers.importance({"fisher": fisher}, table) | parts["importance"]
    order = _most_wanted(table, fisher)
    budget = Budget(room)
    shown = making.part(
        "examples",
        lambda step: _examples(
            model, sample, place, table, order, tokenizer, processor, budget, making, step
        ),
    )
    if shown is not None:
        parts["examples"], parts["profiles"] = shown
    judged = making.part(
        "redundancy",
        lambda step: diversity(
            model, batches, measures=("attention", "outputs"), step=_of(step, len(batches))
        ),
    )
    if judged is not None:
        parts["redundancy"], parts["judged"] = numbers.redundancy(judged, table), judged
    found = making.part(
        "roles",
        lambda step: roles(
            model, batches, tokenizer=tokenizer, step=lambda what, done, total: step(done / max(1, total))
        ),
    )
    if found is not None:
        parts["roles"] = numbers.roles(found, table)
    if fisher is not None:
        parts["curve"] = making.part(
            "curve", lambda step: curve(model, batches[:2], {"fisher": fisher}, step=step)
        )
    _one_by_one(making, parts)


def _of(step: Callable[[float], None], total: int) -> Callable[[float], None]:
    """From steps to the share that is done."""
    done = 0.0

    def told(share: float) -> None:
        nonlocal done
        done += share
        step(min(1.0, done / max(1, total)))

    return told


def _most_wanted(table: HeadTable, fisher: HeadTable | None) -> list[int]:
    """The rows of a table, those that matter most first; without importance, those that look narrowest."""
    if fisher is not None:
        value = fisher["importance"][numbers.aligned(fisher, table)]
    elif "entropy_normalised" in table.sums:
        value = -table["entropy_normalised"]
    else:
        value = torch.zeros(len(table), dtype=torch.float64)
    order: list[int] = value.nan_to_num(-1e300).argsort(descending=True, stable=True).tolist()
    return order


def _examples(
    model: nn.Module,
    sample: Sample,
    place: torch.device,
    table: HeadTable,
    order: Sequence[int],
    tokenizer: Any,
    processor: Any,
    budget: Budget,
    making: _Making,
    step: Callable[[float], None],
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The examples, and the profile of distances over them."""
    wanted: dict[str, list[int]] = {}
    for row in (table.rows[i] for i in order[:LONG_EXACT]):
        wanted.setdefault(row.site, []).append(row.head)

    def exact(site: Site) -> list[int]:
        return wanted.get(site.name, [])

    thumbnail = 48 if len(table) <= 400 else 32 if len(table) <= 1600 else 16
    pooled = 128 if len(table) <= 200 else 64 if len(table) <= 800 else 32
    examples = list(moved(sample.examples, place))
    neighbours = _neighbours(model, list(moved(sample.others, place)) if sample.others else [], tokenizer)
    made = []
    seen: list[Seen] = []
    heads = [(table.rows[i].site, table.rows[i].head) for i in order]
    size = sum(p.numel() for p in model.parameters())
    for number, batch in enumerate(examples):
        found, looked = example(
            model,
            batch,
            tokenizer=tokenizer,
            processor=processor,
            exact=exact,
            thumbnail=thumbnail,
            pooled=pooled,
            pipeline=number == 0,
        )
        length = max((maps.queries for maps in looked.maps), default=1)
        asked = _asked(model, batch, looked, tokenizer, neighbours)
        if asked is not None:
            with torch.no_grad():
                result = looked.result if asked.batch is batch else run(model, asked.batch)
            found["answer"] = {"kind": asked.kind, "items": asked.answer(result, model)}
            if asked.place >= 0:
                found["answer"]["place"] = asked.place
        some = order[: int(WORK / max(1, size * length))]
        begun, share = number / len(examples), 1 / len(examples)
        if some and (number == 0 or len(some) == len(order)):
            found["silenced"] = silenced(
                model,
                batch,
                table.rows,
                question=asked,
                length=length,
                order=some,
                step=lambda done, begun=begun, share=share: step(begun + share * done),  # type: ignore[misc]
            )
            if len(some) < len(order):
                making.notes.append(
                    f"silenced one by one: the {len(some)} most important of {len(order)} heads"
                )
        made.append(found)
        seen.append(looked)
    return [fitted(found, budget, heads) for found in made], _profiles(seen, table)


def _asked(
    model: nn.Module,
    batch: Any,
    looked: Seen,
    tokenizer: Any,
    neighbours: tuple[list[str], Tensor] | None,
) -> Any:
    ids = next((maps.ids for maps in looked.maps if maps.ids), None)
    sites = [maps.site for maps in looked.maps]
    try:
        return question(
            model,
            batch,
            looked.result,
            sites,
            tokenizer=tokenizer,
            ids=ids,
            neighbours=neighbours,
            own=_name(batch, tokenizer) if neighbours is not None else "",
        )
    except ValueError:  # the model returns nothing that could be read
        return None


def _neighbours(model: nn.Module, others: Sequence[Any], tokenizer: Any) -> tuple[list[str], Tensor] | None:
    """Names and embeddings of other inputs."""
    if tokenizer is None or not others:
        return None
    names, values = [], []
    with torch.no_grad():
        for batch in others:
            output = read(run(model, batch), model)
            if output.real is not None:
                return None
            names.append(_name(batch, tokenizer))
            values.append(output.value[:1].float().cpu())
    return names, torch.cat(values)


def _name(batch: Any, tokenizer: Any) -> str:
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    ids = next(x for x in values if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point())
    return visible(str(tokenizer.decode(ids[0].tolist(), skip_special_tokens=True)).strip(), 100)


def _profiles(seen: Sequence[Seen], table: HeadTable) -> dict[str, Any] | None:
    """Attention by distance, the mean over the queries of all examples: (heads, bins)."""
    total = torch.zeros(len(table), 2 * len(EDGES) + 1, dtype=torch.float64)
    count = torch.zeros(len(table), 1, dtype=torch.float64)
    rows = {(row.site, row.head): i for i, row in enumerate(table.rows)}
    for looked in seen:
        for maps in looked.maps:
            if maps.distance is not None:
                index = [rows.get((maps.site.name, head), -1) for head in range(maps.site.heads)]
                known = [head for head, i in enumerate(index) if i >= 0]
                here = torch.tensor([index[head] for head in known], dtype=torch.long)
                total[here] += maps.distance.cpu()[known] * maps.queries
                count[here] += maps.queries
    if not bool(count.any()):
        return None
    mass = total / count.clamp(min=1)
    used = mass.sum(0).nonzero().flatten()
    low, high = int(used.min()), int(used.max()) + 1
    reach = [*EDGES[:-1], 2 * EDGES[-2]]
    offsets = [-edge for edge in reversed(reach)] + [0, *reach]
    return {"offsets": offsets[low:high], "mass": packed(mass[:, low:high], "uint16")}


def _one_by_one(making: _Making, parts: dict[str, Any]) -> None:
    """Leave-one-out as a method of importance: the mean over the examples on which heads were silenced."""
    changes = [each["silenced"]["change"] for each in parts["examples"] if each["silenced"]]
    if not changes:
        return
    values = torch.tensor([[torch.nan if x is None else x for x in one] for one in changes]).double()
    mean = values.nanmean(0)
    error = values.std(0) / len(changes) ** 0.5 if len(changes) > 1 else torch.full_like(mean, torch.nan)
    parts["importance"]["leave-one-out"] = {"mean": plain(mean), "se": plain(error)}
