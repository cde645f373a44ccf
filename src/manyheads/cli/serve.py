"""``manyheads serve``: the live page of a model on this machine."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from manyheads.cli import options

PORT = 8610


def serve(
    model: options.Model = None,
    text: options.Text = None,
    images: options.Images = None,
    host: Annotated[
        str, "The address to listen on; any other than 127.0.0.1 lets other machines in."
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = PORT,
    device: options.Device = None,
    open: Annotated[bool, "Open the page in your browser."] = False,
    json: options.Json = False,
) -> None:
    """Type a text and see every head at once; silence heads and see what the model says without them.

    The page answers as you type or drop an image. Choose heads by hand, by rule or by ranking, see what
    silencing them costs on the first texts or images of the corpus, and download the plan that manyheads
    prune --plan takes. Ctrl-C stops the server.

    [bold]Examples[/bold]

      manyheads serve --open
      manyheads serve out/language --text corpus.txt --port 0
    """
    with Console(stderr=True).status(f"Loading {model or 'the embedded MiniLM'}") as loading:
        from manyheads.view.serve import serve as serve_page
        from manyheads.view.terminal.serving import print_address

        announce = partial(print_address, loading=loading, browser=open, as_json=json)
        serve_page(model, text=text, images=images, host=host, port=port, device=device, announce=announce)
