"""``manyheads serve``: the live page of a model on this machine."""

from functools import partial
from typing import Annotated

import manyheads as mh
from manyheads.cli.options import Json
from manyheads.common.console import loading
from manyheads.view import terminal
from manyheads.view.serve_options import ServeOptions


def serve(
    options: ServeOptions,
    open: Annotated[bool, "Open the page in your browser."] = False,
    json: Json = False,
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
    with loading(options.model) as status:
        announce = partial(terminal.serving.print_address, loading=status, browser=open, as_json=json)
        mh.serve(**vars(options), announce=announce)
