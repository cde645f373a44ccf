"""``manyheads predict``: what a trained model makes of your input."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli.options import Json, TrainedFolder
from manyheads.models.opening import Device
from manyheads.tasks.options import PredictOptions
from manyheads.view import terminal


def predict(
    folder: TrainedFolder,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="Texts, sequences or files, as the task reads them; by default, lines of standard input.",
        ),
    ] = None,
    *,
    options: PredictOptions,
    draw: Annotated[Path | None, "DNA: a figure (.png) of where each head looks along each sequence."] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Translate, continue a text, classify an image, forecast a table, as the model was trained to.

    [bold]Examples[/bold]

      manyheads predict out/translation "forty-two" "Monday, July 24, 1995"
      manyheads predict out/language "The function" --new-tokens 300 --temperature 0.6
      manyheads predict out/images picture.png
      manyheads predict out/series table.csv
      manyheads predict out/dna ACGTTGACAGATTATAATGC --draw out/heads.png
      manyheads predict out/speech recording.wav
      manyheads predict out/picturebook picture.png --caption-language zh
    """
    texts = inputs or [line.rstrip("\n") for line in sys.stdin]
    outputs = mh.predict(folder, texts, device=device, **options.passed)
    terminal.training.print_predictions(texts, outputs, as_json=json)
    if draw is not None:
        title, panels = mh.tasks.attention_panels(folder, texts, outputs, device)
        terminal.training.draw_panels(title, panels, draw)
