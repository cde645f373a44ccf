"""The inputs that a document shows: maps, what the model says, and what changes without each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.progress import Progress
from manyheads.common.run_batch import run
from manyheads.heads.effects.answers import ids_of, kind_of, translated
from manyheads.heads.effects.questions import ask
from manyheads.heads.effects.silencing import silenced
from manyheads.heads.model_outputs import read
from manyheads.heads.observer import moved
from manyheads.heads.pooled_maps import EDGES, Seen
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import unverified_heads
from manyheads.view.document.example import example
from manyheads.view.document.packing import Budget, packed
from manyheads.view.document.sample import Sample
from manyheads.view.document.token_text import visible

# Heads are silenced one by one as long as parameters times tokens times heads are below this.
WORK = 4e11
# Long maps are kept exactly of at most so many heads.
LONG_EXACT = 24


class Examples:
    """The examples of a document, and the distances over them. What fails is left out, with a note.

    order: the rows of the table, the most wanted first.
    """

    def __init__(
        self,
        model: nn.Module,
        table: HeadTable,
        order: Sequence[int],
        tokenizer: Any,
        processor: Any,
        notes: list[str],
    ) -> None:
        self._model, self._table, self._order = model, table, order
        self._tokenizer, self._processor, self._notes = tokenizer, processor, notes
        self._made: list[dict[str, Any]] = []
        self.seen: list[Seen] = []
        left = unverified_heads(table)  # what cannot be proved is not silenced
        self._silent = [i for i in order if table.rows[i].site not in left]
        self._exact: dict[str, list[int]] = {}
        for row in (table.rows[i] for i in order[:LONG_EXACT]):
            self._exact.setdefault(row.site, []).append(row.head)

    def add(self, sample: Sample, place: torch.device, progress: Progress) -> None:
        """Look at the examples of a sample, one after the other."""
        examples = list(moved(sample.examples, place))
        others = list(moved(sample.others, place)) if sample.others else []
        neighbours = self._tried("neighbours", lambda: self._neighbours(others))
        for number, batch in enumerate(examples):
            batch = self._tried("translation", partial(self._written, batch)) or batch
            self._look(batch, neighbours, number == 0, partial(_within, progress, number, len(examples)))

    def _look(self, batch: Any, neighbours: Any, first: bool, progress: Progress) -> None:
        heads = len(self._table)
        found, looked = example(
            self._model,
            batch,
            tokenizer=self._tokenizer,
            processor=self._processor,
            exact=lambda site: self._exact.get(site.name, []),
            thumbnail=48 if heads <= 400 else 32 if heads <= 1600 else 16,
            pooled=128 if heads <= 200 else 64 if heads <= 800 else 32,
            pipeline=first,
        )
        self._made.append(found)
        self.seen.append(looked)
        said = self._tried("answers", lambda: ask(self._model, batch, self._tokenizer, neighbours))
        found["answer"], question = said or (None, None)
        size = sum(p.numel() for p in self._model.parameters())
        length = max((maps.queries for maps in looked.maps), default=1)
        some = self._silent[: int(WORK / max(1, size * length))]
        if not some or not (first or len(some) == len(self._silent)):
            return
        if len(some) < len(self._silent):
            self._notes.append(f"silenced one by one: the {len(some)} most important of {heads} heads")
        found["silenced"] = self._tried(
            "what silencing changes",
            lambda: silenced(
                self._model,
                batch,
                self._table.rows,
                question=question,
                length=length,
                order=some,
                progress=progress,
            ),
        )

    def _tried(self, name: str, make: Callable[[], Any]) -> Any:
        """What a function makes, or None and a note."""
        try:
            return make()
        except Exception as error:  # whatever a strange model does, the rest of the example stands
            why = (str(error).strip().splitlines() or [""])[0][:300]
            note = f"{name}: left out ({type(error).__name__}: {why})"
            if note not in self._notes:
                self._notes.append(note)
            return None

    def _written(self, batch: Any) -> Any:
        """The input with what the model itself writes for it, where it writes one text from another."""
        if not isinstance(batch, Mapping) or "decoder_input_ids" not in batch or "input_ids" not in batch:
            return None
        return translated(self._model, batch) if kind_of(self._model, batch) == "translation" else None

    def _neighbours(self, others: Sequence[Any]) -> tuple[list[str], Tensor] | None:
        """Texts and embeddings of other inputs."""
        if self._tokenizer is None or not others:
            return None
        texts, values = [], []
        with torch.no_grad():
            for batch in others:
                output = read(run(self._model, batch), self._model)
                ids = ids_of(batch)
                if output.real is not None or ids is None:
                    return None
                text = str(self._tokenizer.decode(ids[0].tolist(), skip_special_tokens=True))
                texts.append(visible(text.strip(), 100))
                values.append(output.value[:1].float())
        return texts, torch.cat(values)

    @property
    def changes(self) -> list[list[float | None]]:
        """What silencing each head changed, for each example on which that was measured."""
        return [each["silenced"]["change"] for each in self._made if each["silenced"]]

    def fitted(self, budget: Budget) -> list[dict[str, Any]]:
        """The examples, with as much of each as there is room for."""
        order = [(self._table.rows[i].site, self._table.rows[i].head) for i in self._order]
        made = (fitted(found, budget, order) for found in self._made)
        return [found for found in made if found is not None]


def _within(
    progress: Progress, number: int, examples: int, stage: str, done: float, total: float | None
) -> None:
    progress(stage, number + done / (total or 1), examples)


def profiles(seen: Sequence[Seen], table: HeadTable) -> dict[str, Any] | None:
    """Attention by distance, the mean over the queries of all that was seen: (heads, bins of `EDGES`).

    Offsets are those of keys from queries, the farthest in each bin; cross-attention has none.
    """
    total = torch.zeros(len(table), 2 * len(EDGES) + 1, dtype=torch.float64)
    count = torch.zeros(len(table), 1, dtype=torch.float64)
    rows = {(row.site, row.head): i for i, row in enumerate(table.rows)}
    for maps in (maps for one in seen for maps in one.maps):
        here = [rows.get((maps.site.name, head), -1) for head in range(maps.site.heads)]
        if maps.distance is not None and min(here) >= 0:
            total[here] += maps.distance.cpu() * maps.queries
            count[here] += maps.queries
    mass = total / count.clamp(min=1)
    used = mass.sum(0).nonzero().flatten()
    if not len(used):
        return None
    low, high = int(used.min()), int(used.max()) + 1
    reach = [*EDGES[:-1], 2 * EDGES[-2]]
    offsets = [-edge for edge in reversed(reach)] + [0, *reach]
    return {"offsets": offsets[low:high], "mass": packed(mass[:, low:high], "uint16")}


def fitted(found: dict[str, Any], budget: Budget, order: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """An example with as much of it as there is room for; None when there is no room for its thumbnails.

    Exact maps come last, in the order of the heads given, (site, head).
    """
    exact = {maps["site"]: maps["exact"] for maps in found["maps"]}
    pooled = {maps["site"]: maps["pooled"] for maps in found["maps"] if "pooled" in maps}
    bare = [{key: maps[key] for key in maps if key != "pooled"} | {"exact": {}} for maps in found["maps"]]
    left = found | {"maps": bare, "pipeline": None, "picture": None, "silenced": None}
    if not budget.takes(left):
        return None
    for name in ("picture", "silenced", "pipeline"):
        left[name] = found[name] if budget.takes(found[name]) else None
    for maps in bare:
        if maps["site"] in pooled and budget.takes(pooled[maps["site"]]):
            maps["pooled"] = pooled[maps["site"]]
    kept = {maps["site"]: maps["exact"] for maps in bare}
    for site, head in order:
        one = exact.get(site, {}).get(str(head))
        if one is not None and budget.takes(one):
            kept[site][str(head)] = one
    return left
