"""The card of a pruned model for the terminal: before and after."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.surgery.pruned_folder import PrunedFolder
from manyheads.view.terminal.presentation import PatientConsole, despite_broken_pipe


def print_pruned(pruned: PrunedFolder, *, as_json: bool) -> None:
    """Print the card of a pruned model, and where the model is."""
    with despite_broken_pipe():
        if as_json:
            print(json.dumps(pruned.document, indent=1), flush=True)
        else:
            _print_card(pruned, PatientConsole())


def _print_card(pruned: PrunedFolder, console: Console) -> None:
    document, card = pruned.document, pruned.card
    fitted, held_out = (
        f"{document[part]['sequences']:,} sequences, {document[part]['tokens']:,} tokens"
        for part in ("fitted", "held_out")
    )
    sentence = f"Fitted to {document['corpus']} ({fitted}), compared on every tenth ({held_out})."
    console.print(Text(sentence), soft_wrap=True)
    before, after = card.before.heads, card.after.heads
    title = f"{document['model']}: {before} heads, {after} kept ({after / before:.0%})"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for row in card.rows():
        table.add_row(*row)
    console.print(table)
    layers = [
        f"{size - len(pruned.plan.get(site, []))} of {size}" for site, size in pruned.plan.sizes.items()
    ]
    console.print(Text(f"Heads kept by layer: {', '.join(layers)}"), soft_wrap=True)
    for note in [*card.doubts.sentences(), *document["notes"]]:
        console.print(Text(f"Note: {note}"), soft_wrap=True)
    console.print(Text(f'The model is in {pruned.out}; mh.load("{pruned.out}") loads it.'), soft_wrap=True)


def where_it_stopped(pruned: PrunedFolder, recover: int, curve: bool) -> str | None:
    """The sentence for pruning that Ctrl-C ended; ``recover`` steps and a curve were wanted."""
    if pruned.unfinished is not None:
        return f"Stopped before {recover} steps of recovery were done; {pruned.unfinished} keeps the state."
    if not pruned.interrupted:
        return None
    without = "; the curve is not drawn" if curve and not pruned.has_curve else ""
    return f"Stopped when the smaller model was ready; it is kept{without}."
