"""What ``manyheads inspect`` prints and writes: the summary of a count, its tables, its page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from manyheads.common.language import words
from manyheads.common.progress import Progress
from manyheads.common.types import Keywords
from manyheads.data.batches import Corpus, CorpusSummary
from manyheads.heads.inspect import Counted, table_or_error
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.models.loaded import Loaded, if_any
from manyheads.view.document import About, of_corpus
from manyheads.view.document.assemble import page_work
from manyheads.view.inspect import notes, write_page, write_table
from manyheads.view.progress_bar import progress_bar
from manyheads.view.terminal.presentation import MeasuredPresentation
from manyheads.view.terminal.summary import summary, summary_text

LONG = 10.0  # seconds: a page that takes longer is announced


@dataclass
class InspectPresentation(MeasuredPresentation):
    """What was counted of a model's heads on a corpus, and the folder for its files.

    loaded: the model, with which the page is written, too.
    has_whole_page: whether all that the page needs was measured when it was written.
    """

    counted: Counted
    model: str
    corpus: Corpus | CorpusSummary
    out: Path
    loaded: Loaded | None = None
    has_whole_page: bool = False

    @property
    def table(self) -> HeadTable:
        """The table; raises what ended the counting before there was one."""
        return self.counted.table or table_or_error(self.counted)

    @property
    def about(self) -> Keywords:
        """What the summary says besides the table."""
        counted, corpus = self.counted, self.corpus
        title = words(
            "{model} on {corpus}: {count:,} {unit} in {seconds:.1f} s ({speed:,.0f} {unit}/s), {heads} "
            "heads\nup to {batch:,} tokens at once, {longest:,} in the longest sequence",
            model=self.model, corpus=words(corpus.what), count=counted.units, unit=words(corpus.unit),
            seconds=counted.seconds, speed=counted.units / max(counted.seconds, 1e-9), heads=len(self.table),
            batch=corpus.batch_tokens, longest=corpus.longest,
        )  # fmt: skip
        return {"title": title, "shares": corpus.shares, "notes": [*notes(counted), *corpus.notes]}

    def show(self, console: Console) -> None:
        """The map of layers and heads, and the heads that stand out."""
        summary(self.table, console, **self.about)

    def document(self) -> dict[str, object]:
        """A row for each head with all its statistics."""
        counted, corpus = self.counted, self.corpus
        return {
            "model": self.model,
            "fingerprint": self.table.model,
            "corpus": corpus.what,
            corpus.unit: counted.units,
            "seconds": round(counted.seconds, 3),
            "stopped": counted.stopped,
            "shares": corpus.shares,
            "unknown": corpus.unknown,
            "missed": counted.missed,
            **doubts_in(self.table).as_json(),
            "out": str(self.out),
            "heads": list(self.table),
        }

    def write(self) -> list[str]:
        """heads.json, heads.csv, summary.txt; then report.html, for which a little more is measured."""
        files = write_table(self.table, self.out, summary_text(self.table, **self.about))
        sentences = [
            words("Every number with its standard error: {file}", file=files[1]),
            words("To load, merge and compare: {file}", file=files[0]),
        ]
        if self.loaded is not None and isinstance(self.corpus, Corpus):
            if (seconds := self._page_seconds(self.loaded, self.corpus)) > LONG:
                time = words("{seconds:.0f} s", seconds=seconds)
                if seconds >= 100:
                    time = words("{minutes:.0f} minutes", minutes=seconds / 60)
                sentence = words("Measuring for the page: about {time}. --no-page leaves it out.", time=time)
                Console(stderr=True).print(sentence, soft_wrap=True, highlight=False)
            with progress_bar(words("Measuring")) as progress:
                self.has_whole_page = self._write_page(self.loaded, self.corpus, progress)
            page = self.out / "report.html"
            sentences.append(words("To see every head, open in a browser: {file}", file=page))
        return sentences

    def _page_seconds(self, loaded: Loaded, corpus: Corpus) -> float:
        """About how long the page takes, from the speed of the counting."""
        tokens = sum(corpus.sizes) * self.counted.units / max(1, corpus.total())
        work = page_work(loaded.model, len(self.table), corpus.longest)
        return work * self.counted.seconds / max(1.0, tokens)

    def _write_page(self, loaded: Loaded, corpus: Corpus, progress: Progress) -> bool:
        counted = self.counted
        shares = {name: f"{share:.1%}" for name, share in corpus.shares.items()}
        about = About(
            loaded.name, corpus.what, counted.units, corpus.unit, shares, [*notes(counted), *corpus.notes]
        )
        images = corpus.unit == "images" or loaded.task is not None
        texts = corpus.unit != "images" or loaded.task is not None
        return write_page(
            counted,
            self.out,
            loaded.model,
            partial(of_corpus, corpus, loaded.model),
            about=about,
            tokenizer=if_any(loaded.tokenizer) if texts else None,
            processor=if_any(loaded.processor) if images else None,
            progress=progress,
        )

    def ending(self, interrupted: bool) -> str | None:
        """The sentence for a count that Ctrl-C ended; raises the error that ended one."""
        counted = self.counted
        if counted.error is not None:
            raise ValueError(
                f"{counted.error}; what was counted before that is in {self.out}"
            ) from counted.error
        if counted.stopped:
            return words(
                "Stopped after {done:,} of {total:,} {unit}; they are kept.",
                done=counted.units, total=self.corpus.total(), unit=words(self.corpus.unit),
            )  # fmt: skip
        if self.loaded is not None and not self.has_whole_page:
            return words("Stopped: everything was counted, and the page shows what was measured until then.")
        return words("Ctrl-C came when everything was counted and written.") if interrupted else None
