"""``manyheads predict``: what a trained model makes of your input."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.view import terminal


def predict(
    folder: options.TrainedFolder,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="Texts, sequences or files, as the task reads them; by default, lines of standard input.",
        ),
    ] = None,
    new_tokens: Annotated[int | None, "Language: the number of tokens to write."] = None,
    temperature: Annotated[
        float | None,
        "Language: below 1 sharpens the distribution (more conservative), above 1 flattens it (more "
        "varied); 0 for greedy.",
    ] = None,
    seed: Annotated[int | None, "Language: the seed of the sampling."] = None,
    beams: Annotated[int | None, "Translation, speech: the beam width."] = None,
    language: Annotated[str | None, "Picture book: the language to write; all of them by default."] = None,
    draw: Annotated[Path | None, "DNA: a figure (.png) of where each head looks along each sequence."] = None,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Translate, continue a text, classify an image, forecast a table, as the model was trained to.

    [bold]Examples[/bold]

      manyheads predict out/translation "forty-two" "Monday, July 24, 1995"
      manyheads predict out/language "The function" --new-tokens 300 --temperature 0.6
      manyheads predict out/images picture.png
      manyheads predict out/series table.csv
      manyheads predict out/dna ACGTTGACAGATTATAATGC --draw out/heads.png
      manyheads predict out/speech recording.wav
      manyheads predict out/picturebook picture.png --language zh
    """
    settings = {"new_tokens": new_tokens, "seed": seed, "beams": beams, "language": language}
    passed: dict[str, object] = {name: value for name, value in settings.items() if value is not None}
    if temperature is not None:
        passed["temperature"] = temperature or None  # 0 is greedy
    texts = inputs or [line.rstrip("\n") for line in sys.stdin]
    outputs = mh.predict(folder, texts, device=device, **passed)
    terminal.training.print_predictions(texts, outputs, as_json=json)
    if draw is not None:
        title, panels = mh.tasks.attention_panels(folder, texts, outputs, device)
        terminal.training.draw_panels(title, panels, draw)
