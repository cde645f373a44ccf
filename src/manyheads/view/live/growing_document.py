"""The document of a model, which grows in spare time: numbers first, then the parts that take longer."""

from __future__ import annotations

import json
from collections.abc import Iterator

from manyheads.heads.effects import page_measurements
from manyheads.heads.effects.live_model import table_without_numbers
from manyheads.heads.table import HeadTable
from manyheads.view.document import About, document, head_numbers
from manyheads.view.document.contract import Curve, Example, HeadDocument, Profiles
from manyheads.view.document.examples import left_out, profiles
from manyheads.view.live.contract import LiveProgress
from manyheads.view.live.endpoints import input_result, pipeline, quality_batches
from manyheads.view.live.queue import OthersWaitError, Queue
from manyheads.view.live.selection import RANKINGS, RULES, measured_table
from manyheads.view.live.session import Input, Live, mask_of

STAGES = ("watch", "fisher", "diversity", "roles", "curve", "elimination")


class GrowingDocument:
    """The document of a model, as far as it was measured.

    At first it has the heads, their numbers on a part of the small text, and one example: enough to open the
    page. `steps` measures the rest, in the order of `STAGES`; when a request comes meanwhile, the stage is
    dropped and started again later.
    """

    def __init__(self, live: Live, queue: Queue) -> None:
        self.live, self.queue = live, queue
        self.stages = STAGES if live.read is not None else ()
        self.version = 0
        self.stage = self.stages[0] if self.stages else ""
        self.share = 0.0
        self.finished = not self.stages
        self.notes: list[str] = []
        self._roles: HeadTable | None = None
        self._curve: Curve | None = None
        self._example: tuple[list[Example], Profiles | None] | None = None
        self._encoded: tuple[int, bytes] | None = None  # the version, and the document as JSON

    def progress(self) -> LiveProgress:
        """How far the measuring is, for the page."""
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
            "pictures": self.live.images,
            "rules": list(RULES),
            "rankings": list(RANKINGS),
            "command": self.live.command,
            "waiting": len(self.queue),
        }

    def steps(self) -> Iterator[None]:
        """Measure one stage after the other; each step ends when it is measured, or when a request waits."""
        while not self._encode_ahead():
            yield
        for name in self.stages:
            self.stage, self.share = name, 0.0
            while not self._measure(name):
                yield
            self.version += 1
            while not self._encode_ahead():
                yield
        self.stage, self.finished = "", True

    def document(self) -> bytes:
        """The document as it is now, as JSON."""
        version = self.version
        if self._encoded is None or self._encoded[0] != version:
            self._encoded = version, json.dumps(self._document()).encode()
        return self._encoded[1]

    def first_page(self) -> bytes:
        """What a page that opens asks for, `FirstPage` as JSON; nothing until there is a document."""
        encoded = self._encoded
        if encoded is None:
            return b""
        progress = json.dumps(self.progress() | {"version": encoded[0]}).encode()
        return b'{"progress":' + progress + b',"document":' + encoded[1] + b"}"

    def _encode_ahead(self) -> bool:
        """Have the document ready; False when a request came in between.

        An error is left to the request for the document, which answers with it.
        """
        try:
            self.queue.yield_to_others()
            self.document()
        except OthersWaitError:
            return False
        except Exception:
            return True
        return True

    def _measure(self, name: str) -> bool:
        """Measure one stage; False when a request came in between."""
        live = self.live
        try:
            self.queue.yield_to_others()
            if name == "roles":
                self._roles = page_measurements.roles_of_heads(
                    live.model, live.batches, live.tokenizer, progress=self._on_progress
                )
            elif name == "curve":
                ranked = {"fisher": measured_table(live, "fisher")}
                self._curve = page_measurements.silencing_curve(
                    live.model, quality_batches(live), ranked, self._on_progress
                )
            else:
                measured_table(live, name, self._on_progress)
        except OthersWaitError:
            return False
        except Exception as error:  # whatever an unusual model does, the rest of the page stands
            self.notes.append(left_out(name, error))
        return True

    def _on_progress(self, stage: str, done: float, total: float | None) -> None:
        self.share = min(1.0, done / (total or 1))
        self.queue.yield_to_others()

    def _document(self) -> HeadDocument:
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
        page = document(table, about=titled)
        page["examples"], page["profiles"] = self._first_example(table)
        ranked = {name: tables[name] for name in RANKINGS if name in tables}
        page["importance"] = head_numbers.importance(ranked, table) | page["importance"]
        if "diversity" in tables:
            page["heads"] = head_numbers.heads(table, tables["diversity"])
            page["redundancy"] = head_numbers.redundancy(tables["diversity"], table)
        if self._roles is not None:
            page["roles"] = head_numbers.roles(self._roles, table)
        page["curve"] = self._curve
        return page

    def _first_table(self) -> HeadTable:
        """The heads, with their numbers on a part of the small text; without numbers where there is none."""
        live = self.live
        if live.read is None:
            return table_without_numbers(live.model, live.sites.values())
        return page_measurements.counted_table(live.model, quality_batches(live), live.read.groups)

    def _first_example(self, table: HeadTable) -> tuple[list[Example], Profiles | None]:
        """One input from the small text, and its attention by distance; measured once."""
        if self._example is None:
            live = self.live
            self._example = [], None
            if live.samples or live.read is not None:
                request = Input(text=live.samples[0]) if live.samples else Input(sample=0)
                result = input_result(live, request)
                example: Example = {**result.example, **pipeline(live, request, {})}
                self._example = [example], profiles([result.seen], table)
        return self._example
