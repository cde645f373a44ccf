"""What inspect, roles, diversity and importance share: open a model and a corpus, measure, present."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import manyheads as mh
from manyheads.common.console import loading, say
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.language import words
from manyheads.common.out_folder import prepared
from manyheads.common.processes import rank
from manyheads.data.source import Source
from manyheads.data.split import Split
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.heads.measurements import Measurement
    from manyheads.models.loaded import Loaded


def opened(source: Source, **how: Any) -> "tuple[Loaded, Corpus]":
    """What `Source.open` opens, while a person sees what is loaded."""
    with loading(source.model):
        loaded, corpus = source.open(**how)
    if corpus.reading:
        say(words(corpus.reading))
    return loaded, corpus


def measure(
    measurement: "Measurement",
    source: Source,
    split: Split,
    out: Path,
    json: bool,
    *,
    doing: str = "",
    page: bool | None = None,
    open: bool = False,
    **how: Any,
) -> str | None:
    """Measure, and print and write the result or the part of it that is asked for; the sentence after Ctrl-C.

    ``doing`` is for the progress bar, ``page`` and ``open`` are those of inspect, ``how`` is for `opened`.
    """
    loaded, corpus = opened(source, **how)
    with prepared(out, split.file), interruptible():
        unit = "" if page is None or split.ray is not None else corpus.unit  # the speed, where units count
        with progress_bar(doing, unit=unit, hidden=rank() > 0) as progress:
            result = mh.heads.measurements.split.measure_split(
                split, measurement, loaded, corpus, partial(source.open, **how), out, progress
            )
        if result is None:  # another process has it
            return None
        presentation = terminal.shards.presentation(measurement.verb, result, loaded, corpus, out, bool(page))
        if not presentation.empty:
            terminal.presentation.present(presentation, as_json=json)
        if open and page and not split.file:
            terminal.presentation.open_file(out / "report.html")
        return presentation.ending(interrupted())
