"""``manyheads evaluate``: the metrics of a trained model, on its validation data or on yours."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from manyheads.cli import options
from manyheads.common.interrupts import EXIT_CODE, Interrupted


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
    with errors.status(f"Loading {folder}") as status:
        from manyheads.tasks.trained import evaluate as measure

        def progress(stage: str, done: float, total: float | None) -> None:
            status.update(f"Measuring: {done:,} of {total:,} examples")

        try:
            result = measure(
                folder, data, beams=beams, batch_tokens=batch_tokens, device=device, progress=progress
            )
        except Interrupted:
            errors.print("Stopped before the first batch was measured.")
            raise typer.Exit(EXIT_CODE) from None
    if json:
        document = {"model": str(folder), "examples": result.examples, "metrics": result.metrics}
        print(json_format.dumps(document), flush=True)
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(
            f"{folder} ({result.task}), {result.examples:,} examples of {data or 'what was held out'}"
        )
        for name, value in result.metrics.items():
            console.print(f"  {name:<14} {value:.4f}")
    if result.interrupted:
        errors.print(
            f"Stopped after {result.examples:,} of {result.total:,} examples; the numbers are theirs."
        )
        raise typer.Exit(EXIT_CODE)
