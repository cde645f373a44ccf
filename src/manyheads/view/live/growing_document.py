"""The document of a model, which grows in spare time: numbers first, then what takes longer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from manyheads.common.run_batch import run
from manyheads.heads.roles import roles
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import labels_of, rows_of, watch
from manyheads.surgery.silencing_curve import curve
from manyheads.view.document import About, document, head_numbers
from manyheads.view.document.examples import profiles
from manyheads.view.live import selection
from manyheads.view.live.endpoints import about, measured_on, pipeline
from manyheads.view.live.queue import OthersWaitError, Queue
from manyheads.view.live.session import Input, Live, mask_of

STAGES = ("watch", "fisher", "diversity", "roles", "curve", "elimination")


class Progress:
    """What is known of a model so far.

    Its first document has the heads, their numbers on a part of the small text, and one example: enough to
    open the page. `steps` measures the rest, in the order of `STAGES`; when somebody asks the model
    meanwhile, what was begun is dropped and begun again later.
    """

    def __init__(self, live: Live, queue: Queue) -> None:
        self.live, self.queue = live, queue
        self.stages = STAGES if live.read is not None else ()
        self.version = 0
        self.stage = self.stages[0] if self.stages else ""
        self.share = 0.0
        self.finished = not self.stages
        self.notes: list[str] = []
        self._parts: dict[str, Any] = {}
        self._written: tuple[int, bytes] | None = None

    def told(self) -> dict[str, Any]:
        """How far it is, for the page."""
        return {
            "version": self.version,
            "stage": self.stage,
            "share": round(self.share, 3),
            "done": self.stages.index(self.stage) if self.stage else len(self.stages),
            "stages": list(self.stages),
            "finished": self.finished,
            "reads": "text" if self.live.processor is None else "image",
            "mask": mask_of(self.live.tokenizer) if self.live.kind == "mask" else "",
            "samples": self.live.samples,
            "pictures": self.live.pictures,
            "rules": list(selection.RULES),
            "rankings": list(selection.RANKINGS),
            "command": self.live.command,
        }

    def steps(self) -> Iterator[None]:
        """Measure one thing after the other; each step ends when it is measured, or when somebody waits."""
        while not self._written_ahead():
            yield
        for name in self.stages:
            self.stage, self.share = name, 0.0
            while not self._made(name):
                yield
            self.version += 1
            while not self._written_ahead():
                yield
        self.stage, self.finished = "", True

    def document(self) -> bytes:
        """The document as it is now, as JSON."""
        version = self.version
        if self._written is None or self._written[0] != version:
            self._written = version, json.dumps(self._document()).encode()
        return self._written[1]

    def first(self) -> bytes:
        """What a page that opens asks for, progress and document, as JSON; nothing while it is not known."""
        written = self._written
        if written is None:
            return b""
        told = self.told() | {"version": written[0]}
        return b'{"progress":' + json.dumps(told).encode() + b',"document":' + written[1] + b"}"

    def _written_ahead(self) -> bool:
        """Have the document ready; False when somebody came in between.

        If it cannot be made, who asks for it is told why.
        """
        try:
            self.queue.yield_to_others()
            self.document()
        except OthersWaitError:
            return False
        except Exception:
            return True
        return True

    def _made(self, name: str) -> bool:
        """Measure something; False when somebody came in between."""
        try:
            self.queue.yield_to_others()
            if name == "roles":
                self._parts[name] = roles(
                    self.live.model,
                    self.live.batches,
                    tokenizer=self.live.tokenizer,
                    progress=self._progress,
                )
            elif name == "curve":
                ranked = {"fisher": selection.table(self.live, "fisher")}
                self._parts[name] = curve(
                    self.live.model, measured_on(self.live), ranked, progress=self._progress
                )
            else:
                selection.table(self.live, name, self._progress)
        except OthersWaitError:
            return False
        except Exception as error:  # whatever a strange model does, the rest of the page stands
            why = (str(error).strip().splitlines() or [""])[0][:300]
            self.notes.append(f"{name}: left out ({type(error).__name__}: {why})")
        return True

    def _progress(self, stage: str, done: float, total: float | None) -> None:
        self.share = done / (total or 1)
        self.queue.yield_to_others()

    def _document(self) -> dict[str, Any]:
        live, tables = self.live, self.live.tables
        table = tables.get("watch") or self._first_table()
        unit = "tokens" if live.read is None else live.read.unit
        shares = live.read.shares if live.read else {}
        titled = About(
            model=live.loaded.name,
            corpus="" if live.read is None else live.read.what,
            units=0 if live.read is None or "watch" not in tables else live.read.total(),
            unit=unit,
            groups={name: f"{share:.1%}" for name, share in shares.items()},
            notes=[*([] if live.read is None else live.read.notes), *self.notes],
        )
        made = document(table, about=titled)
        made |= self._example(table)
        ranked = {name: tables[name] for name in selection.RANKINGS if name in tables}
        made["importance"] = head_numbers.importance(ranked, table) | made["importance"]
        if "diversity" in tables:
            made["heads"] = head_numbers.heads(table, tables["diversity"])
            made["redundancy"] = head_numbers.redundancy(tables["diversity"], table)
        if "roles" in self._parts:
            made["roles"] = head_numbers.roles(self._parts["roles"], table)
        made["curve"] = self._parts.get("curve")
        return made

    def _first_table(self) -> HeadTable:
        """The heads, with their numbers on a part of the small text; without numbers where there is none."""
        live = self.live
        if live.read is None:
            sites = list(live.sites.values())
            rows = rows_of(live.model, sites)
            return HeadTable(rows, torch.zeros(len(rows)), {}, live.fingerprint, labels=labels_of(sites))
        with torch.no_grad(), watch(live.model, "full", tokens=live.read.groups) as seen:
            for batch in measured_on(live):
                run(live.model, batch)
        return seen.table

    def _example(self, table: HeadTable) -> dict[str, Any]:
        """One input from the small text, and how far its heads look; made once."""
        if "example" not in self._parts:
            live = self.live
            found: dict[str, Any] = {"examples": [], "profiles": None}
            if live.samples or live.read is not None:
                given = Input(text=live.samples[0]) if live.samples else Input(sample=0)
                asked = about(live, given)
                shown = asked.example | pipeline(live, given, {})
                found = {"examples": [shown], "profiles": profiles([asked.seen], table)}
            self._parts["example"] = found
        return dict(self._parts["example"])
