"""``manyheads serve``: the live page of a model on this machine."""

from functools import partial
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.data.columns import Columns
from manyheads.models.opening import Opening
from manyheads.view import terminal


def serve(
    rows: Columns,
    opening: Opening,
    model: options.Model = None,
    text: options.Text = None,
    images: options.Images = None,
    host: Annotated[
        str, "The address to listen on; any other than 127.0.0.1 lets other machines in."
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any free one.")] = 8610,
    open: Annotated[bool, "Open the page in your browser."] = False,
    json: options.Json = False,
) -> None:
    """Type a text and see every head at once; silence heads and see what the model says without them.

    The page answers as you type or drop an image. Choose heads by hand, by rule or by ranking, see what
    silencing them costs on the first texts, images or labelled rows of the corpus, and download the plan that
    manyheads prune --plan takes. Ctrl-C stops the server.

    [bold]Examples[/bold]

      manyheads serve --open
      manyheads serve out/language --text corpus.txt --port 0
      manyheads serve my-classifier --data reviews.csv --label-column stars
    """
    with options.loading(model) as status:
        announce = partial(terminal.serving.print_address, loading=status, browser=open, as_json=json)
        mh.serve(
            model, text=text, images=images, **vars(rows), host=host, port=port, **opening.how,
            announce=announce,
        )  # fmt: skip
