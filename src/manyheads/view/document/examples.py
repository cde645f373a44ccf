"""The inputs that a document shows: maps, what the model answers, and what changes without each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn

from manyheads.common.devices import batches_to_device
from manyheads.common.errors import describe_error
from manyheads.common.progress import Progress
from manyheads.common.types import Batch
from manyheads.heads.effects.answers import kind_of
from manyheads.heads.effects.neighbours import embedded_texts
from manyheads.heads.effects.questions import ask
from manyheads.heads.effects.silencing import silenced
from manyheads.heads.effects.translations import with_decoder_ids
from manyheads.heads.pooled_maps import EDGES, Seen
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import unverified_heads
from manyheads.view.document.contract import Answer, Example, Maps, Packed, Profiles, Silenced
from manyheads.view.document.example import example
from manyheads.view.document.packing import Budget, packed
from manyheads.view.document.sample import Sample
from manyheads.view.document.token_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Heads are silenced one by one as long as parameters times tokens times heads are below this.
WORK = 2e11
# Long maps are kept exactly for at most this many heads.
LONG_EXACT = 24
# Characters of a neighbour's text.
NEIGHBOUR_TEXT = 100
# Characters of a label, which may be a text.
LABEL_TEXT = 200

T = TypeVar("T")
Neighbours = tuple[list[str], Tensor]


class Examples:
    """The examples of a document, and the distances over them. A part that fails is left out, with a note.

    order: the rows of the table, the most important first.
    silencing: whether heads are silenced one by one, which takes a run of the model for each.
    """

    def __init__(
        self,
        model: nn.Module,
        table: HeadTable,
        order: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
        processor: object,
        notes: list[str],
        *,
        silencing: bool = True,
    ) -> None:
        self._model, self._table, self._order = model, table, order
        self._tokenizer, self._processor, self._notes = tokenizer, processor, notes
        self._examples: list[Example] = []
        self.seen: list[Seen] = []
        unverified = unverified_heads(table)  # heads that are not proved are not silenced
        self._to_silence = [i for i in order if silencing and table.rows[i].site not in unverified]
        self._exact: dict[str, list[int]] = {}
        for row in (table.rows[i] for i in order[:LONG_EXACT]):
            self._exact.setdefault(row.site, []).append(row.head)

    def add(self, sample: Sample, device: torch.device, progress: Progress) -> None:
        """Measure the examples of a sample, one after the other."""
        batches = list(batches_to_device(sample.examples, device))
        others = list(batches_to_device(sample.others, device)) if sample.others else []
        neighbours = self._tried("neighbours", lambda: self._neighbours(others))
        labels = sample.labels or [""] * len(batches)
        for number, (batch, label) in enumerate(zip(batches, labels, strict=True)):
            batch = self._tried("translation", partial(self._with_translation, batch)) or batch
            self._add_one(batch, neighbours, number == 0, partial(_within, progress, number, len(batches)))
            if label:
                self._examples[-1]["label"] = visible(label, LABEL_TEXT)

    def _add_one(self, batch: Batch, neighbours: Neighbours | None, first: bool, progress: Progress) -> None:
        heads = len(self._table)
        shown, seen = example(
            self._model,
            batch,
            tokenizer=self._tokenizer,
            processor=self._processor,
            exact=lambda site: self._exact.get(site.name, []),
            thumbnail=48 if heads <= 400 else 32 if heads <= 1600 else 16,
            pooled=128 if heads <= 200 else 64 if heads <= 800 else 32,
            pipeline=first,
        )
        self._examples.append(shown)
        self.seen.append(seen)
        answer, question = self._tried(
            "answers", lambda: ask(self._model, batch, self._tokenizer, neighbours, seen.result)
        ) or (None, None)
        shown["answer"] = cast("Answer | None", answer)
        size = sum(p.numel() for p in self._model.parameters())
        length = max((maps.queries for maps in seen.maps), default=1)
        order = self._to_silence[: int(WORK / max(1, size * length))]
        if not order or not (first or len(order) == len(self._to_silence)):
            return
        if len(order) < len(self._to_silence):
            self._notes.append(f"silenced one by one: the {len(order)} most important of {heads} heads")
        changes = self._tried(
            "what silencing changes",
            lambda: silenced(
                self._model,
                batch,
                self._table.rows,
                question=question,
                length=length,
                order=order,
                progress=progress,
            ),
        )
        shown["silenced"] = cast("Silenced | None", changes)

    def _tried(self, name: str, measure: Callable[[], T]) -> T | None:
        """What a function returns, or None and a note."""
        try:
            return measure()
        except Exception as error:  # whatever an unusual model does, the rest of the example stands
            note = left_out(name, error)
            if note not in self._notes:
                self._notes.append(note)
            return None

    def _with_translation(self, batch: Batch) -> Batch | None:
        """The input with what the model itself writes for it, where it writes one text from another."""
        if not isinstance(batch, Mapping) or "decoder_input_ids" not in batch or "input_ids" not in batch:
            return None
        if kind_of(self._model, batch) != "translation":
            return None
        return with_decoder_ids(self._model, batch)

    def _neighbours(self, others: Sequence[Batch]) -> Neighbours | None:
        """Texts and embeddings of other inputs."""
        texts, embeddings = embedded_texts(self._model, self._tokenizer, others) or ([], None)
        if embeddings is None:
            return None
        return [visible(text, NEIGHBOUR_TEXT) for text in texts], embeddings

    @property
    def measure_of_changes(self) -> str:
        """What silencing changes, and its unit."""
        measures = (each["silenced"].get("measure", "") for each in self._examples if each["silenced"])
        return next(measures, "")

    @property
    def changes(self) -> list[list[float | None]]:
        """What silencing each head changed, for each example on which that was measured."""
        return [each["silenced"]["change"] for each in self._examples if each["silenced"]]

    def fitted(self, budget: Budget) -> list[Example]:
        """The examples, with as much of each as there is room for."""
        order = [(self._table.rows[i].site, self._table.rows[i].head) for i in self._order]
        examples = (fitted(shown, budget, order) for shown in self._examples)
        return [shown for shown in examples if shown is not None]


def left_out(name: str, error: Exception) -> str:
    """The note about a part that failed.

    >>> left_out("roles", ValueError("no tokenizer"))
    'roles: left out (ValueError: no tokenizer)'
    """
    return f"{name}: left out ({describe_error(error, 300)})"


def _within(
    progress: Progress, number: int, examples: int, stage: str, done: float, total: float | None
) -> None:
    progress(stage, number + done / (total or 1), examples)


def profiles(seen: Sequence[Seen], table: HeadTable) -> Profiles | None:
    """Attention by distance, the mean over the queries of all that was seen: (heads, bins of `EDGES`).

    Offsets are those of keys from queries, the farthest in each bin; cross-attention has none.
    """
    total = torch.zeros(len(table), 2 * len(EDGES) + 1, dtype=torch.float64)
    count = torch.zeros(len(table), 1, dtype=torch.float64)
    rows = {(row.site, row.head): i for i, row in enumerate(table.rows)}
    for maps in (maps for sample in seen for maps in sample.maps):
        heads = [rows.get((maps.site.name, head), -1) for head in range(maps.site.heads)]
        if maps.distance is not None and min(heads) >= 0:
            total[heads] += maps.distance.cpu() * maps.queries
            count[heads] += maps.queries
    mass = total / count.clamp(min=1)
    nonzero_bins = mass.sum(0).nonzero().flatten()
    if not len(nonzero_bins):
        return None
    low, high = int(nonzero_bins.min()), int(nonzero_bins.max()) + 1
    reach = [*EDGES[:-1], 2 * EDGES[-2]]
    offsets = [-edge for edge in reversed(reach)] + [0, *reach]
    return {"offsets": offsets[low:high], "mass": packed(mass[:, low:high], "uint16")}


def fitted(shown: Example, budget: Budget, order: Sequence[tuple[str, int]]) -> Example | None:
    """An example with as much of it as there is room for; None when there is no room for its thumbnails.

    Exact maps come last, in the order of the heads, (site, head).
    """
    thumbnail_maps: list[Maps] = []
    pooled: dict[str, Packed] = {}
    for maps in shown["maps"]:
        thumbnail_map: Maps = {**maps, "exact": {}}
        if "pooled" in thumbnail_map:
            pooled[thumbnail_map["site"]] = thumbnail_map.pop("pooled")
        thumbnail_maps.append(thumbnail_map)
    smaller: Example = {**shown, "maps": thumbnail_maps, "pipeline": None, "picture": None, "silenced": None}
    if not budget.takes(smaller):
        return None
    if budget.takes(shown["picture"]):
        smaller["picture"] = shown["picture"]
    if budget.takes(shown["silenced"]):
        smaller["silenced"] = shown["silenced"]
    if budget.takes(shown["pipeline"]):
        smaller["pipeline"] = shown["pipeline"]
    for maps in thumbnail_maps:
        if maps["site"] in pooled and budget.takes(pooled[maps["site"]]):
            maps["pooled"] = pooled[maps["site"]]
    exact = {maps["site"]: maps["exact"] for maps in shown["maps"]}
    fitting = {maps["site"]: maps["exact"] for maps in thumbnail_maps}
    for site, head in order:
        weights = exact.get(site, {}).get(str(head))
        if weights is not None and budget.takes(weights):
            fitting[site][str(head)] = weights
    return smaller
