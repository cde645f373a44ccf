"""The card of a pruned model for the terminal: before and after."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.language import words
from manyheads.surgery.cut_on_disk import CutFolder
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
        words(
            "{sequences:,} sequences, {tokens:,} tokens",
            sequences=document[part]["sequences"],
            tokens=document[part]["tokens"],
        )
        for part in ("fitted", "held_out")
    )
    sentence = words(
        "Fitted to {corpus} ({fitted}), compared on every tenth ({held_out}).",
        corpus=words(document["corpus"]), fitted=fitted, held_out=held_out,
    )  # fmt: skip
    console.print(Text(sentence), soft_wrap=True)
    before, after = card.before.heads, card.after.heads
    title = words(
        "{model}: {before} heads, {after} kept ({share:.0%})",
        model=document["model"], before=before, after=after, share=after / before,
    )  # fmt: skip
    if before == after:
        title = words(
            "{model}: {before} key heads, now {after}",
            model=document["model"], before=card.before.key_heads, after=card.after.key_heads,
        )  # fmt: skip
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column(words("before"), justify="right")
    table.add_column(words("after"), justify="right")
    for what, *numbers in card.rows():
        table.add_row(what, *numbers)
    console.print(table)
    layers = [
        words("{kept} of {heads}", kept=size - len(pruned.plan.get(site, [])), heads=size)
        for site, size in pruned.plan.sizes.items()
    ]
    console.print(Text(words("Heads kept by layer: {layers}", layers=", ".join(layers))), soft_wrap=True)
    for note in [*card.doubts.sentences(), *document["notes"]]:
        console.print(Text(words("Note: {note}", note=words(note))), soft_wrap=True)
    if (export := document.get("export")) is not None:
        files = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in export["bytes"].items())
        off = max(export["differences"].values(), default=0.0)
        sentence = words(
            "As {format} in {out}: {files}; it differs from the model by at most {off:.1g}.",
            format=export["to"], out=export["out"], files=files, off=off,
        )  # fmt: skip
        console.print(Text(sentence), soft_wrap=True)
    if pruned.has_curve:
        sentence = words("Quality by heads kept, drawn: {file}", file=pruned.out / "curve.png")
        console.print(Text(sentence), soft_wrap=True)
    console.print(Text(_how_to_load(pruned)), soft_wrap=True)


def print_cut_on_disk(cut: CutFolder, *, as_json: bool) -> None:
    """Print what became of a model that was cut on disk, and where it is."""
    removed = sum(map(len, cut.removed.values()))
    with despite_broken_pipe():
        if as_json:
            numbers = {"bytes_before": cut.bytes_before, "bytes_after": cut.bytes_after}
            document = {"out": str(cut.out), "removed": cut.removed, **numbers, "difference": cut.difference}
            print(json.dumps(document, indent=1), flush=True)
            return
        sentence = words(
            "Removed {removed} of {heads} heads: {before:.2f} GB became {after:.2f} GB. Every module that "
            "lost heads equals the silenced one ({off:.0e} at most).",
            removed=removed, heads=cut.heads, before=cut.bytes_before / 1e9, after=cut.bytes_after / 1e9,
            off=cut.difference,
        )  # fmt: skip
        console = PatientConsole()
        console.print(Text(sentence), soft_wrap=True)
        console.print(Text(_how_to_load(cut)), soft_wrap=True)


def where_it_stopped(pruned: PrunedFolder, recover: int, curve: bool) -> str | None:
    """The sentence for pruning that Ctrl-C ended; ``recover`` steps and a curve were wanted."""
    if pruned.unfinished is not None:
        return words(
            "Stopped before {recover} steps of recovery were done; {file} keeps the state.",
            recover=recover, file=pruned.unfinished,
        )  # fmt: skip
    if not pruned.interrupted:
        return None
    if curve and not pruned.has_curve:
        return words("Stopped when the smaller model was ready; it is kept; the curve is not drawn.")
    return words("Stopped when the smaller model was ready; it is kept.")


def _how_to_load(pruned: PrunedFolder | CutFolder) -> str:
    """The last line: where the model is, and what loads it."""
    where = words('The model is in {out}; mh.load("{out}") loads it.', out=pruned.out)
    files = [pruned.out / name for name in ("heads.json", "config.json")]
    if not all(file.is_file() for file in files):
        return where
    heads, config = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if "model_type" not in config:  # not of transformers
        return where
    if heads.get("plain"):
        return f"{where} {words('Plain from_pretrained loads it, too, without manyheads.')}"
    return f"{where} {words('Plain from_pretrained does not: it needs import manyheads first.')}"
