"""Options that several verbs share, with the same help everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.common import commands
from manyheads.common.console import loading

TrainedFolder = Annotated[
    Path, typer.Argument(help="A folder that train wrote, or that prune wrote for a trained model.")
]
Out = Annotated[Path, "The folder for the results; created if it does not exist."]
NewFolder = Annotated[Path, "The folder to write; it must not exist yet."]
Json = Annotated[bool, "Print JSON instead of text."]
Open = Annotated[bool, "Open the page in your browser when it is written."]
Figure = Annotated[bool, "Open the figure when it is drawn."]


def load_torch() -> object:
    """The slow part of what every verb loads: the module is imported when its name is first used."""
    with loading("torch"):
        return mh.models.open


def command(verb: commands.Verb, batch_tokens: int = 4096) -> Callable[..., None]:
    """A verb as Typer takes it; ``batch_tokens`` is the default of that option, if the verb has it."""
    return commands.command(verb, {"batch_tokens": batch_tokens}, load_torch)
