"""What ``manyheads inspect`` does: a model and a corpus by name, a progress bar, a summary, files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from manyheads import corpus
from manyheads.corpus import Corpus
from manyheads.inspection import (
    Counted,
    count,
    finished,
    one_interruption,
    prepare,
    processes,
    rank,
    together,
    write,
)
from manyheads.models import Loaded, load
from manyheads.view.summary import summary, summary_text


def run(
    model: str | None,
    out: Path,
    *,
    text: str | None = None,
    images: str | None = None,
    tokens: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    batch_tokens: int = corpus.BATCH_TOKENS,
    machine: bool = False,
) -> int:
    """Count, tell, write; the exit code: 0, or 130 when Ctrl-C ended it early."""
    console, errors = Console(), Console(stderr=True)
    with errors.status(f"Loading {model or 'the embedded MiniLM'}"):
        loaded = load(model)
        read = choose(loaded, text, images, tokens, max_length, limit, batch_tokens)
    prepare(out)
    share = rank(), processes()
    with one_interruption() as hold:
        with _progress(read, share, errors) as step:
            own = count(loaded.model, read.batches(*share), read.groups, step)
        hold()
        counted = together(own)
        if rank() > 0:
            return 130 if counted.stopped else 0
        if counted.table is None:
            finished(counted)
        _tell_and_write(counted, loaded.name, read, out, console, machine)
        if counted.error is not None:
            raise ValueError(f"{counted.error}; what was counted before that is in {out}") from counted.error
        if counted.stopped:
            errors.print(f"Stopped after {counted.units:,} of {read.total():,} {read.unit}; they are kept.")
        return 130 if counted.stopped else 0


def choose(
    loaded: Loaded,
    text: str | None,
    images: str | None,
    tokens: str | None,
    max_length: int | None,
    limit: int | None,
    batch_tokens: int,
) -> Corpus:
    """The corpus that was asked for: one of text, images and tokens, or a text of our own."""
    given = [
        name for name, x in (("--text", text), ("--images", images), ("--tokens", tokens)) if x is not None
    ]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}; expected one of --text, --images and --tokens")
    for name, number in (("max-length", max_length), ("limit", limit), ("batch-tokens", batch_tokens)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: got {number}; expected 1 or more")
    if text == "-" and processes() > 1:
        raise ValueError(
            "text: several processes cannot share standard input; expected a file: save the text"
        )
    if images is not None:
        return corpus.images(loaded, images, limit=limit, batch_tokens=batch_tokens)
    lengths: Any = {"max_length": max_length, "limit": limit, "batch_tokens": batch_tokens}
    if tokens is not None:
        return corpus.tokens(loaded, tokens, **lengths)
    return corpus.text(loaded, text, **lengths)


def _tell_and_write(
    counted: Counted, name: str, read: Corpus, out: Path, console: Console, machine: bool
) -> None:
    """On the terminal first: what cannot be written is not lost."""
    assert counted.table is not None
    rate = counted.units / max(counted.seconds, 1e-9)
    title = (
        f"{name} on {read.what}: {counted.units:,} {read.unit} in {counted.seconds:.1f} s "
        f"({rate:,.0f} {read.unit}/s), {len(counted.table)} heads"
    )
    notes = [f"{path} was not seen: {why}" for path, why in counted.missed.items()]
    document = as_json(counted, name, read, out)
    if machine:
        print(document, flush=True)
    else:
        summary(counted.table, console, title=title, shares=read.shares, notes=notes)
    try:
        plain = summary_text(counted.table, title=title, shares=read.shares, notes=notes)
        files = write(counted.table, out, plain)
    except OSError as error:
        if machine:
            raise
        print(document, flush=True)
        raise OSError(f"{error}; the table was printed as JSON instead") from error
    if not machine:
        console.print(Text(f"\nEvery number with its standard error: {files[1]}"), soft_wrap=True)
        console.print(Text(f"The same to load, merge and compare: {files[0]}"), soft_wrap=True)


def as_json(counted: Counted, name: str, read: Corpus, out: Path) -> str:
    """What was counted for machines: one JSON object, with a row for each head; null where nothing counts."""
    assert counted.table is not None
    return json.dumps(
        {
            "model": name,
            "fingerprint": counted.table.model,
            "corpus": read.what,
            read.unit: counted.units,
            "seconds": round(counted.seconds, 3),
            "stopped": counted.stopped,
            "shares": read.shares,
            "missed": counted.missed,
            "out": str(out),
            "heads": [{column: _plain(value) for column, value in row.items()} for row in counted.table],
        }
    )


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _progress(read: Corpus, share: tuple[int, int], console: Console) -> Iterator[Callable[[int], None]]:
    """A bar with tokens a second, on a terminal, in the first process."""
    columns = (
        TextColumn("Watching"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal or share[0] > 0
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=read.total(*share), rate="")
        started = perf_counter()
        done = 0

        def step(units: int) -> None:
            nonlocal done
            done += units
            progress.update(
                task, advance=units, rate=f"{done / (perf_counter() - started):,.0f} {read.unit}/s"
            )

        yield step
