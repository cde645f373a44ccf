"""``manyheads prune``: a smaller model in a folder, and a card that says what it costs and saves."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
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
)
from manyheads.common.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from manyheads.data.batches import Corpus
    from manyheads.surgery.comparison import Card
    from manyheads.surgery.plan import Plan

HELD_OUT = 10  # every tenth text
FEWEST = 20
DOING = {"rank": "Ranking", "cut": "Cutting", "refit": "Refitting", "recover": "Recovering", "curve": "Curve"}


def prune(
    model: options.Model = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="A text file, one text a line, to rank, refit and recover on; - reads standard input."
        ),
    ] = None,
    images: options.Images = None,
    tokens: options.Tokens = None,
    data: options.Data = None,
    keep: Annotated[
        float | None, typer.Option(help="The share of heads that stays, between 0 and 1.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan.json to follow instead; it must be of this very model.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit/--no-refit", help="Fit the maps that are left to the uncut model.")
    ] = True,
    recover: Annotated[
        int, typer.Option(help="Train for so many steps to say what the uncut model says.")
    ] = 0,
    rounds: Annotated[int, typer.Option(help="Remove heads in so many goes, and rank again in between.")] = 1,
    method: Annotated[
        str, typer.Option(help="How heads are ranked: a method of manyheads importance.")
    ] = "elimination",
    uniform: Annotated[
        bool, typer.Option("--uniform", help="The same number of heads from every layer.")
    ] = False,
    floor: Annotated[int, typer.Option(help="Heads that every layer keeps at least.")] = 1,
    protect: Annotated[
        str,
        typer.Option(
            help="Heads that stay: 3.5,4.0 (layer.head), or out/roles/roles.json for its retrieval heads, "
            "roles.json:induction for those of another role; or several of these with commas."
        ),
    ] = "",
    metric: Annotated[
        str | None,
        typer.Option(help="Quality by your own function of the model, package.module:function."),
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Also draw quality against heads kept, with the random control.")
    ] = False,
    unverified: options.Unverified = "refuse",
    max_length: options.MaxLength = None,
    limit: Annotated[int | None, typer.Option(help="Read only so many texts or sequences.")] = None,
    batch_tokens: options.BatchTokens = 2048,
    device: options.Device = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for the smaller model; it must not exist yet.")
    ] = Path("out/prune"),
    json: options.Json = False,
) -> None:
    """Cut a model to a share of its heads, refit what is left, and save it.

    Every tenth text is held out: the card compares the two models there, with standard errors, by perplexity,
    by accuracy where the classes are known, by the share of choices that stay where they are not, or by the
    cosine with the uncut model's embedding; it tells sizes and measured times. The folder holds the model for
    mh.load, plan.json, card.json and, with --curve, curve.png. After Ctrl-C during --recover the model is
    saved as far as it got, and the state stays beside the folder: remove the folder and repeat the command to
    go on.
    """
    if (keep is None) == (plan is None):
        raise ValueError("keep: expected one of --keep and --plan")
    if keep is not None and not 0 < keep < 1:
        raise ValueError(f"keep: got {keep}; expected the share of heads that stays, between 0 and 1")
    if recover < 0:
        raise ValueError(f"recover: got {recover}; expected a number of steps, 0 for none")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {out} exists already; choose another folder, or remove it first")
    console, errors = Console(), Console(stderr=True)
    with errors.status(f"Loading {model or 'the embedded MiniLM'}"):
        from manyheads.data.corpus import choose
        from manyheads.models.open import if_any, load

        loaded = load(model, head=True, device=device)
        read = choose(loaded, text, images, tokens, max_length, limit, batch_tokens, data, labels=True)
        judge = None if metric is None else _metric(metric)
        given = None if plan is None else _plan(plan, loaded.model)
        kept = _heads(protect, loaded.model)
    fitted, held_out = split(read)
    state = out.with_name(f"{out.name}.recovery.safetensors") if recover else None
    from manyheads.common.locks import locked
    from manyheads.common.whole_files import tidy, whole_folder, write_whole
    from manyheads.models import folder as files
    from manyheads.surgery import comparison
    from manyheads.surgery.plan import Plan
    from manyheads.surgery.prune import prune as pruned

    with locked(out.with_name(f".{out.name}.lock"), f"out: {out}"), interruptible():
        tidy(out.parent, out.name)
        try:
            with _progress(errors) as progress:
                small = pruned(
                    loaded.model,
                    fitted,
                    keep if keep is not None else 0.5,
                    rounds=rounds,
                    refit=refit,
                    recover=recover,
                    method=method,
                    scope="layer" if uniform else "global",
                    floor=floor,
                    protect=kept,
                    using=given,
                    unverified=unverified,
                    state=state,
                    progress=progress,
                )
        except Interrupted:
            errors.print("Stopped before the smaller model was ready; nothing was written.")
            raise typer.Exit(EXIT_CODE) from None
        except RuntimeError as error:  # cut's own check of what it made
            if str(error).startswith("cut:"):
                raise ValueError(str(error)) from error
            raise
        found = comparison.compare(loaded.model, small, held_out, metric=judge)
        drawn = None
        if curve and not interrupted():
            with suppress(Interrupted), _progress(errors) as progress:
                drawn = _curve(
                    loaded.model, fitted, held_out, method, refit, uniform, judge, unverified, progress
                )
        removed = Plan.of(loaded.model, small, fitted[0])
        document = {
            "model": loaded.name,
            "corpus": read.what,
            "out": str(out),
            **sizes(read),
            **found.as_json(),
        }
        document["original_heads"] = getattr(small, "original_heads", {})
        if drawn is not None:
            document["curve"] = comparison.finite(asdict(drawn))
        written = json_format.dumps(document, indent=1)
        with whole_folder(out) as folder:
            files.save(small, folder, if_any(loaded.tokenizer))
            removed.save(folder / "plan.json")
            write_whole(folder / "card.json", written)
            if drawn is not None:
                from manyheads.view.figures.pruning_curve import draw

                draw(drawn, folder / "curve.png", f"{loaded.name}, {read.what}")
        unfinished = state is not None and _unfinished(state, recover)
        if state is not None and not unfinished:
            state.unlink(missing_ok=True)
        stopped = interrupted()
    if json:
        print(written, flush=True)
    else:
        tell(found, removed, loaded.name, read, out, console)
    if unfinished:
        errors.print(f"Stopped before {recover} steps of recovery were done; {state} keeps where it was.")
    elif stopped:
        lacks = "; the curve is not drawn" if curve and drawn is None else ""
        errors.print(f"Stopped when the smaller model was ready; it is kept{lacks}.")
    raise typer.Exit(EXIT_CODE if stopped or unfinished else 0)


def split(read: Corpus) -> tuple[list[Any], list[Any]]:
    """Batches to fit on, and batches held out, with their labels: every tenth sequence."""
    from manyheads.data.batches import bucketed
    from manyheads.surgery.quality import without_labels

    if len(read.sizes) < FEWEST:
        raise ValueError(
            f"text: {read.what} has {len(read.sizes)} texts; expected at least {FEWEST}, better thousands, "
            "to fit on some and measure on others"
        )
    parts = []
    for indices in _halves(read):
        places = bucketed([read.sizes[i] for i in indices], read.batch_tokens, read.padding)
        parts.append([read.make([indices[place] for place in batch]) for batch in places])
    return [without_labels(batch) for batch in parts[0]], parts[1]


def sizes(read: Corpus) -> dict[str, dict[str, int]]:
    """How many sequences, and how many tokens in them, a model was fitted to and compared on."""
    return {
        name: {"sequences": len(indices), "tokens": sum(read.sizes[i] for i in indices)}
        for name, indices in zip(("fitted", "held_out"), _halves(read), strict=True)
    }


def _halves(read: Corpus) -> tuple[list[int], list[int]]:
    every = range(len(read.sizes))
    return [i for i in every if i % HELD_OUT < HELD_OUT - 1], [
        i for i in every if i % HELD_OUT == HELD_OUT - 1
    ]


def tell(found: Card, removed: Plan, name: str, read: Corpus, out: Path, console: Console) -> None:
    """Print the card."""
    before, after = found.before.heads, found.after.heads
    fitted, held = (
        f"{one['sequences']:,} sequences, {one['tokens']:,} tokens" for one in sizes(read).values()
    )
    console.print(
        Text(f"Fitted to {read.what} ({fitted}), compared on every tenth ({held})."), soft_wrap=True
    )
    table = Table(title=f"{name}: {before} heads, {after} kept ({after / before:.0%})", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for row in found.rows():
        table.add_row(*row)
    console.print(table)
    kept = [f"{size - len(removed.get(site, []))} of {size}" for site, size in removed.sizes.items()]
    console.print(Text(f"Heads kept by layer: {', '.join(kept)}"), soft_wrap=True)
    for note in found.doubts.sentences():
        console.print(Text(f"Note: {note}"), soft_wrap=True)
    console.print(Text(f'The model: {out}; mh.load("{out}") gives it back.'), soft_wrap=True)


def _curve(
    model: nn.Module,
    fitted: list[Any],
    held_out: list[Any],
    method: str,
    refit: bool,
    uniform: bool,
    judge: Callable[[nn.Module], float] | None,
    unverified: Literal["refuse", "allow"],
    progress: Progress,
) -> Any:
    from manyheads.surgery.pruning_curve import METHODS
    from manyheads.surgery.pruning_curve import curve as measured

    methods = tuple(dict.fromkeys((method, *METHODS)))
    return measured(
        model,
        fitted,
        held_out,
        methods=methods,
        refit=refit,
        scope="layer" if uniform else "global",
        metric=judge,
        unverified=unverified,
        progress=progress,
    )


def _plan(path: Path, model: nn.Module) -> Plan:
    from manyheads.surgery.plan import Plan

    made = Plan.load(path)
    made.check(model)
    return made


def _heads(written: str, model: nn.Module) -> dict[int | str, list[int]]:
    """3.5,4.0 as {3: [5], 4: [0]}; roles.json:induction as the heads that have this role."""
    found: dict[int | str, list[int]] = {}
    for part in filter(None, map(str.strip, written.split(","))):
        file, json, role = part.partition(".json")
        layer, dot, head = part.partition(".")
        if json:
            chosen = _with_role(Path(file + json), role.removeprefix(":") or "retrieval", model)
            for site, heads in chosen.items():
                found[site] = sorted({*found.get(site, ()), *heads})
        elif dot and layer.isdecimal() and head.isdecimal():
            found.setdefault(int(layer), []).append(int(head))
        else:
            raise ValueError(
                f"protect: got {part!r}; expected heads as layer.head, such as 3.5,4.0, or a roles.json"
            )
    return found


def _with_role(path: Path, role: str, model: nn.Module) -> dict[str, list[int]]:
    """The heads that a file of ``manyheads roles`` says have a role, of this very model."""
    from manyheads.heads.table import HeadTable
    from manyheads.heads.watch import fingerprint
    from manyheads.surgery.plan import with_roles

    if not path.is_file():
        raise ValueError(f"protect: there is no file {path}; expected what manyheads roles wrote")
    table = HeadTable.load(path)
    if table.model != fingerprint(model):
        raise ValueError(f"protect: {path} is of another model; run manyheads roles on this one")
    try:
        found = with_roles(table, [role])
    except ValueError as error:
        raise ValueError(f"protect: {path}: {error}") from None
    if not found:
        raise ValueError(f"protect: no head in {path} has the role {role}, so there is nothing to protect")
    return found


def _metric(name: str) -> Callable[[nn.Module], float]:
    """A person's own function of a model."""
    import importlib
    import sys

    where, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = getattr(importlib.import_module(where), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"metric: {name!r} cannot be imported ({error}); expected package.module:function"
        ) from error
    if not callable(found):
        raise ValueError(
            f"metric: {name} is no function; expected one that takes the model and returns a number"
        )
    return found  # type: ignore[no-any-return]


def _unfinished(state: Path, steps: int) -> bool:
    """Whether a recovery stopped before its last step."""
    from manyheads.surgery.recover import steps_done

    return state.exists() and steps_done(state) < steps


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for what is being done, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: float, total: float | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(DOING[stage])
            bars.update(tasks[stage], completed=done, total=total)
            if stage != "recover":  # which ends by itself, and keeps where it was
                stop_if_interrupted()

        yield progress
