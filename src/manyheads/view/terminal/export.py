"""What an export wrote, for the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from manyheads.common.json_numbers import plain
from manyheads.common.language import words
from manyheads.models.export import Exported


def print_exported(exported: Exported, *, as_json: bool) -> None:
    """Print the files, how far they are from the model, and what they do not do."""
    if as_json:
        document = asdict(exported) | {"out": str(exported.out)}
        print(json.dumps(plain(document), indent=1), flush=True)
        return
    console = Console()
    for what, off in exported.differences.items():
        console.print(
            Text(words("Compared on {what}: largest difference {off:.1e}", what=words(what), off=off)),
            soft_wrap=True,
        )
    for note in exported.notes:
        console.print(Text(words("Note: {note}", note=words(note))), soft_wrap=True)
    where = words(
        "The model is in {out} ({target}): {files}",
        out=exported.out, target=exported.target, files=", ".join(exported.files),
    )  # fmt: skip
    console.print(Text(where), soft_wrap=True)
