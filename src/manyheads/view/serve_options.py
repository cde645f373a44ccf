"""What is served, and where: the options of ``manyheads serve``. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from manyheads.data.labelled_options import LabelledOptions
from manyheads.data.source import Images, Model, Text
from manyheads.models.opening import Opening


@dataclass(frozen=True)
class ServeOptions(Opening, LabelledOptions):
    """The arguments of `serve`. The text beside each type is the help of its option."""

    model: Model = None
    text: Text = None
    images: Images = None
    host: Annotated[str, "The address to listen on; any other than 127.0.0.1 lets other machines in."] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = 8610
