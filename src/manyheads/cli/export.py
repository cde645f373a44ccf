"""``manyheads export`` and ``push``: a model in a format that runs elsewhere, and a folder on the hub."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli.options import Json, NewFolder
from manyheads.common.console import loading
from manyheads.common.language import words
from manyheads.models.opening import Format, Opening
from manyheads.view import terminal


def export(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or package.module:factory.")],
    to: Annotated[
        Format, "The format: for onnxruntime, torch.export.load, llama.cpp, OpenVINO or ExecuTorch."
    ],
    opening: Opening,
    out: NewFolder = Path("out/export"),
    json: Json = False,
) -> None:
    """Write a model, cut or not, in a format that runs without manyheads, run it and compare.

    Its outputs differ from the model's by at most 1e-4, or nothing is written, and a sentence says which
    module the format cannot take. A model with a key/value cache is written with it, too, where that works.
    """
    with loading(words("{model} and writing {format}", model=model, format=to)):
        exported = mh.export(model, to=to, out=out, **opening.how)
    terminal.export.print_exported(exported, as_json=json)


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that prune or mh.save wrote.")],
    repo: Annotated[str, typer.Argument(help="Repository on the hub: owner/name.")],
    private: Annotated[bool, "Make a newly created repository private."] = False,
) -> None:
    """Upload a model to the Hugging Face hub; log in first, with hf auth login.

    If it has no README.md, its model card is written first; where the hub cannot be reached, that is all.
    """
    typer.echo(words("The model is at {address}", address=mh.push(folder, repo, private=private)))
