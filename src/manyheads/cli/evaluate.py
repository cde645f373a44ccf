"""``manyheads evaluate``: the metrics of a trained model, on its validation data or on yours."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from manyheads.cli import options
from manyheads.common.interrupts import EXIT_CODE, Interrupted, interrupted, interruptible


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A folder that train wrote, or prune of such a one.")],
    data: Annotated[
        str | None, typer.Option(help="What to measure on; without, what was held out in training.")
    ] = None,
    beams: Annotated[
        int | None, typer.Option(help="Hypotheses kept while translating: more is slower, and better.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="How many tokens run through the model at once.")] = 4096,
    device: options.Device = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """How good a trained model is, by the metrics of its task, on all examples.

    Of --data, the part for testing is read if it has one; of the data that the model learned from, what was
    held out. Files that only the folder names are not read: name them by --data.
    """
    errors = Console(stderr=True)
    with errors.status(f"Loading {folder}"):
        from manyheads import tasks
        from manyheads.training.evaluation import evaluate as measure

        task: Any
        task, model = tasks.load(folder, device)
        if beams is not None:
            if not hasattr(task, "beams"):
                raise ValueError(f"beams: {task.name} has none; leave the option out")
            task.beams = beams
        examples = tasks.held_out(folder, task) if data is None else tasks.read_data(folder, task, data)
    done = 0
    with interruptible(), errors.status("Measuring") as status:

        def step(count: int) -> None:
            nonlocal done
            done += count
            status.update(f"Measuring: {done:,} of {len(examples):,} examples")

        try:
            metrics = measure(task, model, examples, batch_tokens=batch_tokens, step=step, partly=True)
        except Interrupted:
            errors.print("Stopped before the first batch was measured.")
            raise typer.Exit(EXIT_CODE) from None
        stopped = interrupted()
    if json:
        print(json_format.dumps({"model": str(folder), "examples": done, "metrics": metrics}), flush=True)
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{folder} ({task.name}), {done:,} examples of {data or 'what was held out'}")
        for name, value in metrics.items():
            console.print(f"  {name:<14} {value:.4f}")
    if stopped:
        errors.print(f"Stopped after {done:,} of {len(examples):,} examples; the numbers are theirs.")
        raise typer.Exit(EXIT_CODE)
