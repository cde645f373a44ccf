"""``manyheads roles``: which head does what, each claim with its evidence."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from manyheads.cli import options
from manyheads.common.interrupts import EXIT_CODE, Interrupted, interrupted, interruptible
from manyheads.common.progress import Progress

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.heads.table import HeadTable

# Heads named for a role, the strongest first.
NAMED = 8


def roles(
    model: options.Model = None,
    treebank: Annotated[
        Path | None, typer.Option(help="Sentences with dependencies (CoNLL-U), for syntactic roles.")
    ] = None,
    text: options.Text = None,
    images: options.Images = None,
    tokens: options.Tokens = None,
    data: options.Data = None,
    max_length: options.MaxLength = None,
    limit: options.Limit = None,
    batch_tokens: options.BatchTokens = 4096,
    device: options.Device = None,
    only: Annotated[str | None, typer.Option(help="Some roles only, as in: induction,retrieval")] = None,
    least: Annotated[int, typer.Option(help="With fewer cases than this nothing is claimed.")] = 100,
    out: options.Out = Path("out/roles"),
    json: options.Json = False,
) -> None:
    """What each head is for: positional, sink, induction, syntactic and others, each held against a baseline.

    The model reads your text (or one of ours), random tokens that come twice, a key planted in a long text,
    and the sentences of a treebank if you give one. A head has a role when it does what the role says clearly
    more often than somebody who knows nothing; what cannot be said is named. Writes roles.json, roles.csv and
    roles.txt.
    """
    console, errors = Console(), Console(stderr=True)
    with errors.status(f"Loading {model or 'the embedded MiniLM'}"):
        from manyheads.common.out_folder import prepared
        from manyheads.data import corpus
        from manyheads.heads.roles import roles as find
        from manyheads.models.open import load

        loaded = load(model, head=True, device=device)
        read = corpus.choose(loaded, text, images, tokens, max_length, limit, batch_tokens, data)
        tokenizer = None
        if read.unit == "tokens" and (tokens is None or treebank is not None):
            tokenizer = loaded.tokenizer()
    with prepared(out), interruptible():
        try:
            with _progress(errors) as progress:
                table = find(
                    loaded.model,
                    (batch for _, batch in read.batches()),
                    treebank,
                    tokenizer=tokenizer,
                    only=None if only is None else [name.strip() for name in only.split(",")],
                    least=least,
                    progress=progress,
                )
        except Interrupted:
            errors.print("Stopped before the first batch was read; nothing was written.")
            raise typer.Exit(EXIT_CODE) from None
        title = f"{loaded.name} on {read.what}: {len(table)} heads"
        if json:
            print(as_json(table, loaded.name, read, out), flush=True)
        else:
            tell(table, console, title, read.notes)
        files = write(table, out, title, read.notes)
        stopped = interrupted()
    if not json:
        console.print(Text(f"\nEvery score with its baseline and count: {files[1]}"), soft_wrap=True)
        console.print(Text(f"The same to load in Python: {files[0]}"), soft_wrap=True)
    if stopped:
        errors.print("Stopped: the roles are judged on what was read until then.")
        raise typer.Exit(EXIT_CODE)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for what is being read, on a terminal."""
    columns = (
        TextColumn("Reading {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: float, total: float | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


def tell(table: HeadTable, console: Console, title: str, about: Sequence[str] = ()) -> None:
    """Print which heads have which role, the strongest first; then what could not be said."""
    from manyheads.heads.roles.role import ROLES
    from manyheads.heads.unverified_sites import doubts_in

    console.print(Text(title, style="bold"), soft_wrap=True)
    found = claimed(table)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("role")
    shown.add_column("heads", justify="right")
    shown.add_column("the strongest, as layer.head score", overflow="fold")
    shown.add_column("baseline", justify="right")
    shown.add_column("cases", justify="right")
    for label, (column, heads) in found.items():
        score, baseline = table[f"{column}_score"], table[f"{column}_baseline"]
        best = ", ".join(f"{_name(table, row)} {score[row]:.2f}" for row in heads[:NAMED])
        more = f", and {len(heads) - NAMED} more" if len(heads) > NAMED else ""
        cases = table.sums[f"{column}_score"][0][heads[0]]
        shown.add_row(
            label, str(len(heads)), Text(best + more), f"{baseline[heads[0]]:.2f}", f"{int(cases):,}"
        )
    console.print()
    console.print(shown if found else "No head has a role that can be claimed.")
    without = sum(not words for words in table["roles"])
    console.print(Text(f"\n{without} of {len(table)} heads have none of these roles."))
    names = dict.fromkeys(column.partition(":")[0] for column, _ in found.values())
    for name in names:
        console.print(Text(f"  {name}: {ROLES[name].says} Baseline: {ROLES[name].against}."), soft_wrap=True)
    for note in (*doubts_in(table).sentences(), *about):
        console.print(Text(f"\nNote: {note}"), soft_wrap=True)
    notes = dict.fromkeys(note for words in table["not_judged"] for note in words.split("; ") if note)
    if notes:
        console.print(Text("\nNot judged:"))
    for note in notes:
        console.print(Text(f"  {note}"), soft_wrap=True)


def claimed(table: HeadTable) -> dict[str, tuple[str, list[int]]]:
    """For each role that some head has: the column it was judged by, and the rows, the strongest first."""
    from manyheads.heads.roles.role import ROLES

    found: dict[str, tuple[str, list[int]]] = {}
    for column in (name.removesuffix("_score") for name in table.sums if name.endswith("_score")):
        name, _, variant = column.partition(":")
        for label in ROLES[name].claims if name in ROLES else ():
            label = label.format(variant=variant)
            heads = [row for row, words in enumerate(table["roles"]) if label in words.split(", ")]
            if heads:
                score, baseline = table[f"{column}_score"], table[f"{column}_baseline"]
                gain = (score - baseline).abs().tolist()
                found[label] = column, sorted(heads, key=lambda row: -gain[row])
    return found


def _name(table: HeadTable, row: int) -> str:
    """layer.head, with the site where layers of several stacks have the same number."""
    one = table.rows[row]
    stacks = {other.site for other in table.rows if other.layer == one.layer}
    return f"{one.layer}.{one.head}" if len(stacks) == 1 else f"{one.site}.{one.head}"


def as_json(table: HeadTable, model: str, read: Corpus, out: Path) -> str:
    """The table for machines: one JSON object, with a row for each head; null where nothing was counted."""
    from manyheads.heads.unverified_sites import doubts_in

    counts = {name: total[0].tolist() for name, total in table.sums.items() if name.endswith("_score")}
    heads = []
    for number, row in enumerate(table):
        plain = {c: None if isinstance(x, float) and not math.isfinite(x) else x for c, x in row.items()}
        cases = {f"{name.removesuffix('_score')}_count": int(each[number]) for name, each in counts.items()}
        heads.append(plain | cases)
    found: dict[str, Any] = {"model": model, "fingerprint": table.model, "corpus": read.what}
    found |= {"unknown": read.unknown, **doubts_in(table).as_json(), "out": str(out), "heads": heads}
    return json_format.dumps(found)


def write(table: HeadTable, out: Path, title: str, about: Sequence[str] = ()) -> list[Path]:
    """Write the table and its summary under a folder; returns the files."""
    from manyheads.common.whole_files import write_whole

    files = [out / name for name in ("roles.json", "roles.csv", "roles.txt")]
    out.mkdir(parents=True, exist_ok=True)
    table.save(files[0])
    table.save(files[1])
    plain = StringIO()
    tell(table, Console(file=plain, width=110, color_system=None), title, about)
    write_whole(files[2], plain.getvalue())
    return files
