"""``manyheads importance``: which heads matter, by several methods side by side."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from manyheads.cli import options
from manyheads.common.interrupts import (
    EXIT_CODE,
    Interrupted,
    interrupted,
    interruptible,
    stop_if_interrupted,
    until_interrupted,
)
from manyheads.common.progress import Progress

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.heads.importance import Agreement
    from manyheads.heads.table import HeadTable
    from manyheads.models.open import Loaded

# Heads shown from each end of the ranking.
SHOWN = 8
STATE = "leave-one-out.state.json"
# Methods that run the model many times: half of that says nothing. The others read the batches once.
MANY_PASSES = ("leave-one-out", "gates")


def importance(
    model: options.Model = None,
    method: Annotated[
        str,
        typer.Option(
            help="One or several: fisher, elimination, gradient, leave-one-out, confidence, output-norm, "
            "relevance, gates, random."
        ),
    ] = "fisher",
    loss: Annotated[
        str | None,
        typer.Option(
            help="For gradient, leave-one-out and gates: causal, masked, classification, seq2seq, embedding."
        ),
    ] = None,
    gates: Annotated[
        int | None, typer.Option(help="How many heads the method gates keeps; half of them by default.")
    ] = None,
    text: options.Text = None,
    images: options.Images = None,
    tokens: options.Tokens = None,
    data: options.Data = None,
    unverified: options.Unverified = "refuse",
    max_length: options.MaxLength = None,
    limit: options.Limit = None,
    batch_tokens: options.BatchTokens = 1024,
    device: options.Device = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn at random.")] = 0,
    out: options.Out = Path("out/importance"),
    json: options.Json = False,
) -> None:
    """Which heads matter: each method's ranking with standard errors, and how far the methods agree.

    fisher predicts what silencing each head would change, for all heads from one backward pass and without
    labels. leave-one-out silences one head after the other: exact, slow, and resumable: after Ctrl-C the same
    command goes on where it stopped. Language models are judged by KL(full || silenced) in nats a token,
    classifiers by the same in nats a sequence, models without a head of their own by 1 - cosine of the mean
    hidden state.
    """
    console, errors = Console(), Console(stderr=True)
    with errors.status(f"Loading {model or 'the embedded MiniLM'}"):
        from manyheads.common.out_folder import prepared
        from manyheads.data.corpus import choose
        from manyheads.heads.importance import METHODS
        from manyheads.heads.importance.losses import named
        from manyheads.models.open import load

        methods = list(dict.fromkeys(name.strip() for name in method.split(",") if name.strip()))
        unknown = [name for name in methods if name not in METHODS]
        if unknown or not methods:
            wrong = ", ".join(unknown) or repr(method)
            raise ValueError(f"method: expected some of {', '.join(METHODS)}, got {wrong}")
        named(loss)
        loaded = load(model, head=True, device=device)
        labels = loss == "classification" and loaded.task is not None
        read = choose(loaded, text, images, tokens, max_length, limit, batch_tokens, data, labels=labels)
    found = Found(
        loaded.name, f"{read.what}: {read.total():,} {read.unit}, up to {batch_tokens:,} tokens at once", out
    )
    with prepared(out), interruptible():
        with _progress(len(read.plan()), errors) as progress:
            for name in methods:
                started = perf_counter()
                try:
                    stop_if_interrupted()
                    found.tables[name] = _judged(
                        loaded, read, name, loss, gates, seed, out / STATE, unverified, progress
                    )
                    found.seconds[name] = perf_counter() - started
                except Interrupted:
                    break
                except ValueError as error:
                    found.error = None if interrupted() else error  # there was no batch to judge by yet
                    break
        found.stopped = name if interrupted() else ""
        finish(found, console, errors, json)
    raise typer.Exit(EXIT_CODE if found.stopped else 0)


@dataclass
class Found:
    """What the methods have found so far, and what ended it."""

    model: str
    corpus: str
    out: Path
    tables: dict[str, HeadTable] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stopped: str = ""  # the method that Ctrl-C ended
    error: ValueError | None = None

    @property
    def agreements(self) -> list[Agreement]:
        """Between each two methods."""
        from manyheads.heads.importance import agreement

        return agreement(self.tables) if len(self.tables) > 1 else []


def _judged(
    loaded: Loaded,
    read: Corpus,
    method: str,
    loss: str | None,
    gates: int | None,
    seed: int,
    state: Path,
    unverified: Literal["refuse", "allow"],
    progress: Progress,
) -> HeadTable:
    from manyheads.heads.importance import WITH_LOSS
    from manyheads.heads.importance import importance as judge

    fed: Iterator[Any] = (batch for _, batch in read.batches())
    if method not in MANY_PASSES:
        fed = until_interrupted(fed)
    if loss == "masked":
        fed = _hidden(loaded, fed, seed)
    loss = loss if method in WITH_LOSS else None
    gates = gates if method == "gates" else None

    def stoppable(stage: str, done: float, total: float | None) -> None:
        progress(stage, done, total)
        if method in MANY_PASSES:
            stop_if_interrupted()

    table = judge(
        loaded.model,
        fed,
        method,
        loss,
        gates=gates,
        seed=seed,
        state=state,
        unverified=unverified,
        progress=stoppable,
    )
    if method == "leave-one-out":
        state.unlink(missing_ok=True)
    return table


def _hidden(loaded: Loaded, batches: Iterator[Any], seed: int) -> Iterator[Any]:
    """The batches with some tokens masked, by the tokenizer's own mask."""
    import torch

    from manyheads.heads.importance.losses import hide_tokens

    tokenizer = loaded.tokenizer()
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError(
            f"loss: masked needs a tokenizer with a mask token, and that of {loaded.name} has none; take "
            "another loss"
        )
    generator = torch.Generator().manual_seed(seed)
    for batch in batches:
        yield hide_tokens(batch, mask, tokenizer.all_special_ids, generator)


def finish(found: Found, console: Console, errors: Console, machine: bool) -> None:
    """Tell and write what was found; raise what went wrong after that."""
    if found.tables:
        if machine:
            print(as_json(found), flush=True)
        else:
            tell(found, console)
        files = write(found)
        if not machine:
            console.print(Text(f"\nWritten: {', '.join(map(str, files))}"), soft_wrap=True)
    if found.stopped:
        kept = "; the same command goes on where it was" if (found.out / STATE).exists() else ""
        if found.stopped in found.tables and found.stopped not in MANY_PASSES:
            kept = ": its numbers are of the batches that were read until then"
        errors.print(Text(f"Stopped during {found.stopped}{kept}."), soft_wrap=True)
    if found.error is not None:
        done = f"; what was found before is in {found.out}" if found.tables else ""
        raise ValueError(f"{found.error}{done}") from found.error


def tell(found: Found, console: Console) -> None:
    """The heads at both ends of the first method's ranking, with all numbers; then the agreement."""
    from manyheads.heads.unverified_sites import doubts_in

    tables = found.tables
    first, *_ = tables.values()
    console.print(Text(f"{found.model} on {found.corpus}, {len(first)} heads", "bold"), soft_wrap=True)
    for name, table in tables.items():
        about = f"{name}: {table['measure'][0]}; {found.seconds[name]:.1f} s"
        console.print(Text(about), soft_wrap=True)
    order = first["importance"].nan_to_num(-math.inf).argsort(descending=True, stable=True).tolist()
    ranks = {name: _ranks(table) for name, table in tables.items()}
    ends = order if len(order) <= 2 * SHOWN else [*order[:SHOWN], None, *order[-SHOWN:]]
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("layer.head")
    for name in tables:
        shown.add_column(name, justify="right")
        shown.add_column("rank", justify="right")
    for row in ends:
        if row is None:
            shown.add_row("...")
            continue
        cells = []
        for name, table in tables.items():
            cells += [_with_error(table, row), str(ranks[name][row])]
        shown.add_row(_name(first, row), *cells)
    console.print()
    console.print(shown)
    for one in found.agreements:
        console.print(
            Text(
                f"{one.first} and {one.second}: Spearman {one.spearman:.2f}, 95% interval {one.low:.2f} to "
                f"{one.high:.2f}, over {one.heads} heads"
            ),
            soft_wrap=True,
        )
    for note in doubts_in(first).sentences():
        console.print(Text(f"\nNote: {note}"), soft_wrap=True)


def _with_error(table: HeadTable, row: int) -> str:
    value, error = table["importance"][row].item(), table["importance_se"][row].item()
    return f"{value:.3g}" + (f" ± {error:.1g}" if math.isfinite(error) else " ± ?")


def _ranks(table: HeadTable) -> list[int]:
    """1 for the most important head."""
    order = table["importance"].nan_to_num(-math.inf).argsort(descending=True, stable=True)
    ranks = order.argsort() + 1
    return [int(rank) for rank in ranks]


def _name(table: HeadTable, row: int) -> str:
    """layer.head, with the site where layers of several stacks have the same number."""
    one = table.rows[row]
    stacks = {other.site for other in table.rows if other.layer == one.layer}
    return f"{one.layer}.{one.head}" if len(stacks) == 1 else f"{one.site}.{one.head}"


def as_json(found: Found) -> str:
    """One JSON object for machines: a row for each head with all numbers; null where there is none."""
    from manyheads.heads.unverified_sites import doubts_in

    first, *_ = found.tables.values()
    heads = [dict(row._asdict()) for row in first.rows]
    for name, table in found.tables.items():
        for column, key in (("importance", name), ("importance_se", f"{name}_se")):
            for head, value in zip(heads, table[column].tolist(), strict=True):
                head[key] = _plain(value)
    return json_format.dumps(
        {
            "model": found.model,
            "fingerprint": first.model,
            "corpus": found.corpus,
            "measures": {name: table["measure"][0] for name, table in found.tables.items()},
            "seconds": {name: round(seconds, 3) for name, seconds in found.seconds.items()},
            "stopped": found.stopped or None,
            **doubts_in(first).as_json(),
            "agreement": [
                {name: _plain(value) for name, value in one._asdict().items()} for one in found.agreements
            ],
            "out": str(found.out),
            "heads": heads,
        }
    )


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(found: Found) -> list[Path]:
    """A table for each method, to load and to plan cuts by, and the summary; returns the files."""
    from manyheads.common.whole_files import write_whole

    files = []
    for name, table in found.tables.items():
        for kind in ("json", "csv"):
            files.append(found.out / f"{name}.{kind}")
            table.save(files[-1])
    plain = StringIO()
    tell(found, Console(file=plain, width=110, color_system=None))
    files.append(found.out / "importance.txt")
    write_whole(files[-1], plain.getvalue())
    return files


@contextmanager
def _progress(batches: int, console: Console) -> Iterator[Progress]:
    """A bar for each method, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(stage: str, done: float, total: float | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=batches if total is None else total)

        yield progress
