"""Options that several verbs have: the same words, and the same help, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a hub name, or package.module:factory; without it, the embedded MiniLM."),
]
Text = Annotated[str | None, typer.Option(help="A text file, one text a line; - reads standard input.")]
Images = Annotated[str | None, typer.Option(help="A folder of pictures.")]
Tokens = Annotated[
    str | None, typer.Option(help="Token ids in a NumPy file: (sequences, length) or (length,).")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="What the task of a trained model reads, as train takes it; else what training held out."
    ),
]
MaxLength = Annotated[int | None, typer.Option(help="Cut longer sequences into pieces of this many tokens.")]
Limit = Annotated[int | None, typer.Option(help="Read only so many texts, pictures or sequences.")]
BatchTokens = Annotated[int, typer.Option(help="How many tokens run through the model at once.")]
Device = Annotated[
    str | None, typer.Option(help="Where the model runs: cpu, cuda:1, mps ...; else the accelerator if any.")
]
Unverified = Annotated[
    Literal["refuse", "allow"],
    typer.Option(help="What to do with heads at sites of which nothing could be proved: refuse, or allow."),
]
Out = Annotated[Path, typer.Option(help="The folder for the results; made if it is not there.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
