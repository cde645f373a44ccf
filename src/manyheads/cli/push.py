"""``manyheads push``: a folder on the Hugging Face hub, with its model card."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that prune or mh.save wrote.")],
    repo: Annotated[str, typer.Argument(help="What it is called on the hub: owner/name.")],
    private: Annotated[bool, "Whether a new one is private."] = False,
) -> None:
    """Upload a model to the Hugging Face hub, where you are logged in by hf auth login.

    If it has no README.md, its model card is written first: what was cut, on which text, the quality before
    and after, and how to load it. Where the hub cannot be reached, the card is all that happens.
    """
    typer.echo(f"The model is at {mh.push(folder, repo, private=private)}")
