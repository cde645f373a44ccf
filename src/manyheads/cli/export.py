"""``manyheads export``: a model in a format that runs elsewhere, run and compared."""

from pathlib import Path
from typing import Annotated, Literal

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.view import terminal


def export(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or package.module:factory.")],
    to: Annotated[
        Literal["onnx", "torch-export", "gguf", "openvino", "executorch"],
        "The format: for onnxruntime, torch.export.load, llama.cpp, OpenVINO or ExecuTorch.",
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for the files; it must not exist yet.")
    ] = Path("out/export"),
    json: options.Json = False,
) -> None:
    """Write a model, cut or not, in a format that runs without manyheads.

    What was written is run and compared with the model: its outputs differ by at most 1e-4, or nothing is
    written, and a sentence says which module the format cannot take. Models with a key/value cache are
    written without and with it where the format allows.
    """
    with options.loading(f"{model} and writing {to}"):
        exported = mh.export(model, to=to, out=out)
    terminal.export.print_exported(exported, as_json=json)
