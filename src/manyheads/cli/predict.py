"""``manyheads predict``: what a trained model makes of your input."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from manyheads.cli import options


def predict(
    folder: Annotated[Path, typer.Argument(help="A folder that train wrote, or prune of such a one.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="Texts, sequences, or files, as the task has it; without, lines of standard input.",
        ),
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Language: how many tokens to write.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Language: below 1 sharpens the distribution (more conservative), above 1 flattens it (more "
            "varied); 0 for greedy."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Language: another number, another text.")] = None,
    beams: Annotated[int | None, typer.Option(help="Translation, speech: hypotheses kept.")] = None,
    language: Annotated[
        str | None, typer.Option(help="Picture book: which language to write; all of them without.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="DNA: a picture (.png) of where every head looks along each sequence.")
    ] = None,
    device: options.Device = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Translate, continue a text, name a picture, forecast a table, as the model was trained to.

    [bold]Examples[/bold]

      manyheads predict out/translation "forty-two" "Monday, July 24, 1995"
      manyheads predict out/language "The function" --new-tokens 300 --temperature 0.6
      manyheads predict out/images picture.png
      manyheads predict out/series table.csv
      manyheads predict out/dna ACGTTGACAGATTATAATGC --draw out/heads.png
      manyheads predict out/speech recording.wav
      manyheads predict out/picturebook picture.png --language zh
    """
    chosen = {"new_tokens": new_tokens, "temperature": temperature, "seed": seed, "beams": beams}
    passed = {n: v for n, v in (chosen | {"language": language}).items() if v is not None}
    given = inputs or [line.rstrip("\n") for line in sys.stdin]
    with Console(stderr=True).status(f"Loading {folder}"):
        from manyheads.tasks import trained

        found = trained.predict(folder, given, device=device, **passed)
    for before, after in zip(given, found, strict=True):
        print(json_format.dumps({"input": before, "output": after}) if json else after)
    if draw is not None:
        _draw(folder, given, found, draw, device)
        Console(stderr=True).print(f"Where the heads look: {draw}", soft_wrap=True, highlight=False)


def _draw(folder: Path, given: list[str], found: list[str], path: Path, device: str | None) -> None:
    """Every head along every input, in one picture."""
    from manyheads.heads.along_sequence import along
    from manyheads.models.open import open_model
    from manyheads.tasks.dna import DNA
    from manyheads.view.figures.along_sequence import draw

    loaded = open_model(str(folder), device=device)
    task, model = loaded.task, loaded.model
    if not isinstance(task, DNA):
        raise ValueError(f"draw: {folder} reads no sequences of bases; leave the option out")
    panels = []
    for sequence, answer in zip(given, found, strict=True):
        batch, letters = task.one(sequence)
        seen = along(model, [batch], query=0 if task.pooling == "first" else None)
        panels.append((f"{answer}: {sequence[:100]}", seen, letters))
    who = "the class token" if task.pooling == "first" else "all tokens, in the mean"
    draw(panels, path, f"{folder}: where {who} looks")
