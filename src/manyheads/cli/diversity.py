"""``manyheads diversity``: which heads are alike, told and drawn."""

from __future__ import annotations

import json as json_format
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from manyheads.cli import options
from manyheads.common.interrupts import EXIT_CODE, interrupted, interruptible, until_interrupted

if TYPE_CHECKING:
    from manyheads.heads.table import HeadTable


def diversity(
    model: options.Model = None,
    text: options.Text = None,
    images: options.Images = None,
    tokens: options.Tokens = None,
    data: options.Data = None,
    max_length: options.MaxLength = None,
    limit: options.Limit = None,
    batch_tokens: options.BatchTokens = 2048,
    device: options.Device = None,
    rows: Annotated[int, typer.Option(help="How many queries of each batch to compare attention on.")] = 128,
    measures: Annotated[
        str | None,
        typer.Option(help="Some of attention,outputs,subspaces,contributions,gradients; all without it."),
    ] = None,
    out: options.Out = Path("out/diversity"),
    json: options.Json = False,
) -> None:
    """Which heads of a model are alike, which differ, which work together and which cancel each other.

    Compares every pair of heads: where they look, what they say, what their weights read, what they add to
    the residual stream, how the output depends on them. Prints how distinct the heads of each layer are and
    the pairs that stand out; draws map.png, on which like heads stand together, and matrices.png; writes
    diversity.json and diversity.txt.
    """
    console, errors = Console(), Console(stderr=True)
    with errors.status(f"Loading {model or 'the embedded MiniLM'}"):
        from manyheads.common.out_folder import prepared
        from manyheads.data import corpus
        from manyheads.heads.diversity import MEASURES
        from manyheads.heads.diversity import diversity as compare
        from manyheads.models.open import load

        loaded = load(model, head=True, device=device)
        read = corpus.choose(loaded, text, images, tokens, max_length, limit, batch_tokens, data)
    columns = TextColumn("Comparing heads"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with prepared(out), interruptible():
        with (
            warnings.catch_warnings(record=True) as warned,
            Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar,
        ):
            warnings.simplefilter("always")
            task = bar.add_task("", total=len(read.plan()))
            total, compared = len(read.plan()), 0

            def progress(stage: str, done: float, total: float | None) -> None:
                nonlocal compared
                compared = int(done)
                bar.update(task, completed=done)

            try:
                table = compare(
                    loaded.model,
                    until_interrupted(batch for _, batch in read.batches()),
                    measures=MEASURES if measures is None else [name.strip() for name in measures.split(",")],
                    rows=rows,
                    progress=progress,
                )
            except ValueError:
                if compared or not interrupted():
                    raise
                errors.print("Stopped before the first batch was compared; nothing was written.")
                raise typer.Exit(EXIT_CODE) from None
        said = (str(each.message) for each in warned)
        notes = [note.removeprefix("diversity: ") for note in said if note.startswith("diversity: ")]
        if compared < total:
            notes.append(f"Ctrl-C ended it: these are the numbers of {compared} of {total} batches.")
        tokens_read = int(table["tokens"].max())
        title = f"{loaded.name} on {read.what}: {len(table)} heads, {tokens_read:,} tokens"
        if json:
            print(as_json(table, loaded.name, read.what, notes, out), flush=True)
        else:
            from manyheads.view.diversity_text import tell

            tell(table, console, title=title, notes=notes)
        with errors.status("Drawing"):
            files = write(table, out, title, loaded.name, notes)
        stopped = interrupted()
    if not json:
        for what, file in files.items():
            console.print(Text(f"{what}: {file}"), soft_wrap=True)
    if stopped:
        errors.print(f"Stopped after {compared} of {total} batches; what they show is kept.")
        raise typer.Exit(EXIT_CODE)


def as_json(table: HeadTable, model: str, what: str, notes: list[str], out: Path) -> str:
    """The table and its summary for machines: one JSON object; null where nothing was measured."""
    from manyheads.heads.diversity import layers
    from manyheads.heads.unverified_sites import doubts_in

    return json_format.dumps(
        _plain(
            {
                "model": model,
                "fingerprint": table.model,
                "corpus": what,
                "notes": notes,
                **doubts_in(table).as_json(),
                "out": str(out),
                "layers": [layer._asdict() for layer in layers(table)],
                "heads": list(table),
                "matrices": {name: matrix.tolist() for name, matrix in table.matrices.items()},
            }
        )
    )


def _plain(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(table: HeadTable, out: Path, title: str, name: str, notes: list[str]) -> dict[str, Path]:
    """Write the table, its summary and the pictures under a folder; what each file is."""
    from manyheads.common.whole_files import write_whole
    from manyheads.view.diversity_text import as_text
    from manyheads.view.figures.diversity import draw_map, draw_matrices

    files = {"\nEvery pair, to load in Python": out / "diversity.json", "This summary": out / "diversity.txt"}
    table.save(out / "diversity.json")
    write_whole(out / "diversity.txt", as_text(table, title=title, notes=notes))
    if "js" in table.matrices:
        files["The map of all heads"] = out / "map.png"
        draw_map(table, out / "map.png", name)
    files["The matrices of all pairs"] = out / "matrices.png"
    draw_matrices(table, out / "matrices.png", name)
    return files
