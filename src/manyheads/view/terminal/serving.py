"""The live page on the terminal: where it is."""

from __future__ import annotations

import json
import webbrowser

from rich.console import Console
from rich.text import Text

from manyheads.view.live.session import Live


def announce(live: Live, address: str, *, browser: bool, as_json: bool) -> None:
    """Print the address of a page as soon as it answers, and open it in a browser if that is wanted."""
    if as_json:
        print(json.dumps({"model": live.loaded.name, "heads": live.heads, "address": address}), flush=True)
    else:
        console = Console()
        console.print(Text(f"{live.loaded.name}, {live.heads} heads: {address}"), soft_wrap=True)
        console.print("Press Ctrl-C to stop.", style="dim")
        console.file.flush()
    if browser:
        webbrowser.open(address)
