"""The live page on the terminal: where it is."""

from __future__ import annotations

import json
import webbrowser

from rich.console import Console
from rich.status import Status
from rich.text import Text

from manyheads.common.language import words
from manyheads.view.live.session import Live


def print_address(live: Live, address: str, *, loading: Status, browser: bool, as_json: bool) -> None:
    """Print the address of a page as soon as it answers, and open it in a browser if that is wanted.
    ``loading`` is the status that is shown until then.
    """
    loading.stop()
    if as_json:
        print(json.dumps({"model": live.loaded.name, "heads": live.heads, "address": address}), flush=True)
    else:
        console = Console()
        if live.read is not None and live.read.reading:
            console.print(Text(words(live.read.reading)), soft_wrap=True)
        console.print(
            Text(
                words(
                    "{model}, {heads} heads: {address}",
                    model=live.loaded.name,
                    heads=live.heads,
                    address=address,
                )
            ),
            soft_wrap=True,
        )
        console.print(words("Press Ctrl-C to stop."), style="dim")
        console.file.flush()
    if browser:
        webbrowser.open(address)
