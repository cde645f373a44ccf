"""``manyheads serve``: the live page of a model on this machine."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from manyheads.cli import options

if TYPE_CHECKING:
    from manyheads.view.live.session import Live

PORT = 8610


def serve(
    model: options.Model = None,
    text: Annotated[
        str | None,
        typer.Option(help="A text file, one text a line, to measure on: its first texts; else one of ours."),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="A folder of pictures to measure on, for models that read pictures.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Others than 127.0.0.1 let other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = PORT,
    device: options.Device = None,
    open: Annotated[bool, typer.Option("--open", help="Open the page in your browser.")] = False,
    json: options.Json = False,
) -> None:
    """Type a text and see every head at once; silence heads and see what the model would say without them.

    The page answers as you type or drop a picture. Choose heads by hand, by rule or by ranking, watch what
    their silence costs, and download the plan that manyheads prune --plan takes. Ctrl-C ends it.

    [bold]Examples[/bold]

      manyheads serve --open
      manyheads serve out/language --text corpus.txt --port 0
    """
    console, loading = Console(), Console(stderr=True).status(f"Loading {model or 'the embedded MiniLM'}")

    def announce(live: Live, address: str) -> None:
        loading.stop()
        if json:
            print(json_format.dumps({"model": live.loaded.name, "heads": live.heads, "address": address}))
        else:
            console.print(Text(f"{live.loaded.name}, {live.heads} heads: {address}"), soft_wrap=True)
            console.print("Ctrl-C ends it.", style="dim")
        import sys

        sys.stdout.flush()
        if open:
            import webbrowser

            webbrowser.open(address)

    with loading:
        from manyheads.view.serve import serve as serve_page

        serve_page(model, text=text, images=images, host=host, port=port, device=device, announce=announce)
