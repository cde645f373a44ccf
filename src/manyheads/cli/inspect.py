"""``manyheads inspect``: a model and a corpus by name, a progress bar, a summary, files."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from manyheads.cli import options
from manyheads.common.interrupts import EXIT_CODE, interrupted, interruptible
from manyheads.common.progress import Progress

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.heads.inspect import Counted
    from manyheads.models.open import Loaded


def inspect(
    model: options.Model = None,
    text: options.Text = None,
    images: options.Images = None,
    tokens: options.Tokens = None,
    data: options.Data = None,
    max_length: options.MaxLength = None,
    limit: options.Limit = None,
    batch_tokens: options.BatchTokens = 4096,
    device: options.Device = None,
    out: options.Out = Path("out/inspect"),
    json: options.Json = False,
) -> None:
    """What every head of a model does on a corpus: exact, at any length, under the model's fast kernels.

    Prints a map of layers and heads and the heads that stand out; writes heads.json, heads.csv, summary.txt
    and report.html: one page, to look at every head. Ctrl-C keeps what was counted so far, a second one
    leaves at once. To use several processes, with or without GPUs, write
    `torchrun --nproc-per-node 2 -m manyheads inspect ...` or
    `accelerate launch --multi_gpu --num_processes 2 -m manyheads inspect ...`
    (accelerate starts a single process when it is given `--cpu`).
    """
    code = run(
        model,
        out,
        text=text,
        images=images,
        tokens=tokens,
        data=data,
        max_length=max_length,
        limit=limit,
        batch_tokens=batch_tokens,
        device=device,
        machine=json,
    )
    raise typer.Exit(code)


def run(
    model: str | None,
    out: Path,
    *,
    text: str | None,
    images: str | None,
    tokens: str | None,
    data: str | None,
    max_length: int | None,
    limit: int | None,
    batch_tokens: int,
    device: str | None,
    machine: bool,
) -> int:
    """Count, tell, write; the exit code: 0, or 130 when Ctrl-C ended it early."""
    console, errors = Console(), Console(stderr=True)
    with errors.status(f"Loading {model or 'the embedded MiniLM'}"):
        from manyheads.common.out_folder import prepared
        from manyheads.common.processes import processes, rank
        from manyheads.data.corpus import choose
        from manyheads.heads.inspect import count, finished, together
        from manyheads.models.open import load

        if text == "-" and processes() > 1:
            raise ValueError(
                "text: several processes cannot share standard input; expected a file: save the text"
            )
        loaded = load(model, device=device)
        read = choose(loaded, text, images, tokens, max_length, limit, batch_tokens, data)
    share = rank(), processes()
    with prepared(out), interruptible():
        with _progress(read, share, errors) as progress:
            own = count(loaded.model, read.batches(*share), read.groups, progress=progress)
        counted = together(own)
        if rank() > 0:
            return EXIT_CODE if counted.stopped else 0
        if counted.table is None and counted.stopped:
            errors.print("Stopped before the first batch was counted; nothing was written.")
            return EXIT_CODE
        if counted.table is None:
            finished(counted)
        _tell_and_write(counted, loaded.name, read, out, console, machine)
        whole = _tell_on_a_page(counted, loaded, read, out, errors)
        late = interrupted()
    if not machine:
        console.print(
            Text(f"To look at every head, open in a browser: {out / 'report.html'}"), soft_wrap=True
        )
    if counted.error is not None:
        raise ValueError(f"{counted.error}; what was counted before that is in {out}") from counted.error
    if counted.stopped:
        errors.print(f"Stopped after {counted.units:,} of {read.total():,} {read.unit}; they are kept.")
    elif not whole:
        errors.print("Stopped: all was counted, and the page shows what was measured for it so far.")
    elif late:
        errors.print("All was counted and written when Ctrl-C came.")
    return EXIT_CODE if late or not whole else 0


def _tell_and_write(
    counted: Counted, name: str, read: Corpus, out: Path, console: Console, machine: bool
) -> None:
    """On the terminal first: what cannot be written is not lost."""
    from manyheads.view.inspect import notes, write
    from manyheads.view.terminal.summary import summary, summary_text

    assert counted.table is not None
    rate = counted.units / max(counted.seconds, 1e-9)
    title = (
        f"{name} on {read.what}: {counted.units:,} {read.unit} in {counted.seconds:.1f} s "
        f"({rate:,.0f} {read.unit}/s), {len(counted.table)} heads\n"
        f"up to {read.batch_tokens:,} tokens at once, {max(read.sizes):,} in the longest sequence"
    )
    said = [*notes(counted), *read.notes]
    document = as_json(counted, name, read, out)
    if machine:
        print(document, flush=True)
    else:
        summary(counted.table, console, title=title, shares=read.shares, notes=said)
    try:
        plain = summary_text(counted.table, title=title, shares=read.shares, notes=said)
        files = write(counted.table, out, plain)
    except OSError as error:
        if machine:
            raise
        print(document, flush=True)
        raise OSError(f"{error}; the table was printed as JSON instead") from error
    if not machine:
        console.print(Text(f"\nEvery number with its standard error: {files[1]}"), soft_wrap=True)
        console.print(Text(f"The same to load, merge and compare: {files[0]}"), soft_wrap=True)


def _tell_on_a_page(counted: Counted, loaded: Loaded, read: Corpus, out: Path, errors: Console) -> bool:
    """Measure what the page needs besides the counts, and write it; whether all of it was measured."""
    from manyheads.models.open import if_any
    from manyheads.view.document import About, of_corpus
    from manyheads.view.inspect import notes, tell

    shares = {name: f"{share:.1%}" for name, share in read.shares.items()}
    about = About(loaded.name, read.what, counted.units, read.unit, shares, [*notes(counted), *read.notes])
    names = ["processor" if read.unit == "images" else "tokenizer"]
    if loaded.task is not None:
        names = ["processor", "tokenizer"]
    given = {name: if_any(getattr(loaded, name)) for name in names}
    columns = (TextColumn("Measuring {task.description}"), BarColumn(), TaskProgressColumn())
    with Bars(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        task = bars.add_task("", total=1.0)

        def progress(stage: str, done: float, total: float | None) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        sample = partial(of_corpus, read, loaded.model)
        return tell(counted, out, loaded.model, sample, about=about, progress=progress, **given)


def as_json(counted: Counted, name: str, read: Corpus, out: Path) -> str:
    """What was counted for machines: one JSON object, with a row for each head; null where nothing counts."""
    from manyheads.heads.unverified_sites import doubts_in

    assert counted.table is not None
    return json_format.dumps(
        {
            "model": name,
            "fingerprint": counted.table.model,
            "corpus": read.what,
            read.unit: counted.units,
            "seconds": round(counted.seconds, 3),
            "stopped": counted.stopped,
            "shares": read.shares,
            "unknown": read.unknown,
            "missed": counted.missed,
            **doubts_in(counted.table).as_json(),
            "out": str(out),
            "heads": [{column: _plain(value) for column, value in row.items()} for row in counted.table],
        }
    )


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _progress(read: Corpus, share: tuple[int, int], console: Console) -> Iterator[Progress]:
    """A bar with tokens a second, on a terminal, in the first process."""
    columns = (
        TextColumn("Watching"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal or share[0] > 0
    with Bars(*columns, console=console, transient=True, disable=hidden) as bars:
        task = bars.add_task("", total=read.total(*share), rate="")
        started = perf_counter()

        def progress(stage: str, done: float, total: float | None) -> None:
            bars.update(task, completed=done, rate=f"{done / (perf_counter() - started):,.0f} {read.unit}/s")

        yield progress
