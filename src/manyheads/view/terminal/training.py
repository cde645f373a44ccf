"""Trained models on the terminal: a bar while training runs, then results, metrics and predictions."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from manyheads.common.json_numbers import plain
from manyheads.common.language import words
from manyheads.heads.along_sequence import Along
from manyheads.tasks import find
from manyheads.tasks.trained import Evaluation
from manyheads.training.dynamic_heads import DynamicHeads
from manyheads.training.head_health import LOGGER
from manyheads.training.loop import Result
from manyheads.training.report import Report
from manyheads.view.figures.along_sequence import draw
from manyheads.view.terminal.presentation import print_notes

HEADS = "heads.png"  # the figure of heads that changed, in the folder of a run
COLUMNS = 12  # of the table of heads
SMOOTH = 0.9  # how much of the loss and the speed shown is that of the steps before


@contextmanager
def training_bar(
    task: str, *, hidden: bool = False, console: Console | None = None
) -> Iterator[Callable[[Report], None]]:
    """A callback that shows loss, metric, tokens a second, dead heads and the time left, on stderr.

    ``task`` is the name of the task that is trained.
    """
    console, metric = console or Console(stderr=True, quiet=hidden), find(task).metric
    columns = (
        TextColumn(words("Training")),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    loss = seconds = tokens = 0.0
    latest: dict[str, str] = {}  # of evaluations and looks at the heads, which are not made at every step
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        steps = bar.add_task("", total=None, numbers="")

        def show(report: Report) -> None:
            nonlocal loss, seconds, tokens
            loss = SMOOTH * loss + (1 - SMOOTH) * report.loss if seconds else report.loss
            seconds = SMOOTH * seconds + report.seconds
            tokens = SMOOTH * tokens + report.tokens
            if report.metrics:
                latest[metric] = words(
                    "held-out {metric} {value:.3f}", metric=metric, value=report.metrics[metric]
                )
            if report.heads is not None:
                dead = int(report.heads["dead"].nansum())
                latest["dead"] = ""
                if dead:
                    latest["dead"] = words("{dead} of {heads} heads dead", dead=dead, heads=len(report.heads))
            speed = words("{speed:,.0f} tokens/s", speed=tokens / max(seconds, 1e-9))
            numbers = "  ".join(
                filter(None, [words("training loss {loss:.3f}", loss=loss), *latest.values(), speed])
            )
            for alarm in report.alarms:
                bar.console.print(str(alarm), style="yellow", highlight=False)
            bar.update(steps, completed=report.step, total=report.steps, numbers=numbers)
            for act in report.acts:
                bar.console.print(f"  {act}", highlight=False)
            if report.metrics:
                mark = " *" if report.best else ""
                step = words("step {step:,}", step=report.step)
                bar.console.print(f"{step}  {numbers}{mark}", highlight=False)

        logger, was_disabled = logging.getLogger(LOGGER), logging.getLogger(LOGGER).disabled
        logger.disabled = True  # its alarms are shown here
        try:
            yield show
        finally:
            logger.disabled = was_disabled


def print_training(result: Result, data: str | None, valid: str | None, *, as_json: bool) -> None:
    """What came of a run, and the commands to continue with: they name the data, which the folder may not."""
    if result.dynamic is not None:
        result.dynamic.draw(result.out / HEADS)
    if as_json:
        numbers = {"step": result.step, "best_step": result.best_step, "ended": result.ended}
        document = {"out": str(result.out), **numbers, "metrics": result.metrics, "notes": result.notes}
        print(json.dumps(document), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(words("Data: {note}.", note=words(note)))
    if result.ended == "interrupted":
        return
    done = words("{count:,} steps", count=result.step)
    if result.ended == "early":
        done = words("{steps}, no improvement any more", steps=done)
    best = words("The best weights, of step {step:,}, reach", step=result.best_step)
    console.print(f"{done}. {best}")
    print_metrics(result.metrics, console)
    if result.dynamic is not None:
        print_heads(result.dynamic, console)
        console.print(words("heads by layer over time: {file}", file=result.out / HEADS))
    console.print(words("They are in {out}: try", out=result.out))
    measured = [] if data is None else ["--data", valid or data]
    for verb in ("predict", "evaluate", "inspect"):
        command = ["manyheads", verb, str(result.out), *(measured if verb != "predict" else [])]
        console.print(f"  {shlex.join(command)}")


def print_metrics(metrics: dict[str, float], console: Console) -> None:
    """The metrics of a task, a line each."""
    for metric, value in metrics.items():
        name = words(metric)
        console.print(f"  {name}{' ' * max(1, 15 - cell_len(name))}{value:.4f}")


def print_heads(dynamic: DynamicHeads, console: Console) -> None:
    """The number of heads of every site, at the start and after each change."""
    kept = dynamic.history[:: max(len(dynamic.history) // COLUMNS, 1)]
    kept += [] if kept[-1] is dynamic.history[-1] else [dynamic.history[-1]]
    table = Table(box=None, pad_edge=False)
    table.add_column(words("heads after step"))
    for step, _ in kept:
        table.add_column(f"{step:,}", justify="right")
    for site in kept[0][1]:
        table.add_row(site, *(str(heads[site]) for _, heads in kept))
    totals = [sum(heads.values()) for _, heads in kept]
    table.add_row(words("all"), *map(str, totals))
    console.print(table)
    kinds = {
        kind: sum(act.kind == kind for act in dynamic.acts) for kind in ("cut", "reseed", "split", "add")
    }
    done = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number) or words("no change")
    console.print(words("{changes}; log.jsonl says why", changes=done))


def how_to_resume(result: Result, task: str, data: str | None, valid: str | None) -> str | None:
    """The sentence for a run that Ctrl-C ended."""
    if result.ended != "interrupted":
        return None
    options = [part for name, path in (("--data", data), ("--valid", valid)) if path for part in (name, path)]
    command = shlex.join(["manyheads", "train", task, "--resume", "--out", str(result.out), *options])
    return words("Stopped after step {step:,}; continue with: {command}", step=result.step, command=command)


def print_evaluation(result: Evaluation, model: str, data: str | None, *, as_json: bool) -> None:
    """The metrics of a model, with their intervals where they have some."""
    if as_json:
        document: dict[str, object] = {"model": model, "task": result.task}
        document |= {"examples": result.examples, "metrics": result.metrics}
        if result.intervals:
            intervals = {name: [one.low, one.high] for name, one in result.intervals.items()}
            document |= {"intervals": intervals, "reading": result.reading, "notes": result.notes}
        print(json.dumps(plain(document)), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not result.intervals:
        examples = words(
            "{count:,} examples of {data}", count=result.examples, data=data or words("what was held out")
        )
        console.print(f"{model} ({words(result.task)}), {examples}")
        print_metrics(result.metrics, console)
        return
    console.print(words("{model} on {corpus}", model=model, corpus=words(result.reading)))
    for name, one in result.intervals.items():
        ends = words("no interval")
        if math.isfinite(one.low):
            ends = words("95% interval {low:.4f} to {high:.4f}", low=one.low, high=one.high)
        metric = words(name.replace("_", " "))
        console.print(f"  {metric}{' ' * max(1, 21 - cell_len(metric))}{one.mean:.4f}  ({ends})")
    print_notes(result.notes, console)


def where_it_stopped(result: Evaluation) -> str | None:
    """The sentence for an evaluation that Ctrl-C ended."""
    if not result.interrupted:
        return None
    return words(
        "Stopped after {done:,} of {total:,} examples; the metrics are theirs.",
        done=result.examples, total=result.total,
    )  # fmt: skip


def draw_panels(title: str, panels: Sequence[tuple[str, Along, Sequence[str]]], path: Path) -> None:
    """Draw where heads look along sequences, and say where the figure is."""
    draw(panels, path, title)
    sentence = words("Where the heads look: {file}", file=path)
    Console(stderr=True).print(sentence, soft_wrap=True, highlight=False)


def print_predictions(inputs: Sequence[str], outputs: Sequence[str], *, as_json: bool) -> None:
    """What a trained model makes of each input, a line each."""
    for text, output in zip(inputs, outputs, strict=True):
        print(json.dumps({"input": text, "output": output}) if as_json else output)
