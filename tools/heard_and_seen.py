"""Pictures for docs/speech.md and docs/picturebook.md, drawn from trained models.

    python tools/heard_and_seen.py speech FOLDER DATA [--out docs/pictures]
    python tools/heard_and_seen.py picturebook FOLDER FOLDER DATA [--out docs/pictures]

FOLDER is what `manyheads train speech --kind decoder` wrote; for the picture book, what `--kind cross` wrote,
then what `--kind single` wrote. DATA is what they were trained on, or none; what was held out is shown.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import font_manager, pyplot
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

import manyheads as mh
from manyheads import tasks
from manyheads.data.batches import bucketed
from manyheads.data.readers.audio import HOP
from manyheads.tasks.picturebook.models import picture_shares
from manyheads.tasks.picturebook.task import Picturebook
from manyheads.tasks.speech.task import Speech
from manyheads.view.colour import RAMP
from manyheads.view.figures.fonts import EAST_ASIAN

ATTENTION = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=("speech", "picturebook"))
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    matplotlib.use("Agg")
    installed = {font.name for font in font_manager.fontManager.ttflist}
    pyplot.rcParams["font.family"] = ["DejaVu Sans", *(name for name in EAST_ASIAN if name in installed)]
    warnings.filterwarnings("ignore", "Glyph .* missing from font")
    *folders, data = options.paths
    if options.task == "speech":
        heard(folders[0], data, options.out)
        spread_of_heads(folders[0], data, options.out)
    else:
        looked_at(folders[0], data, options.out)
        shared(folders[1], data, options.out)


def heard(folder: str, data: str, out: Path) -> None:
    """A string of digits as a spectrum, and below it where each word that is written looks, head by head."""
    task, model = tasks.load(folder)
    assert isinstance(task, Speech)
    frames, words = task.open(None if data == "none" else data).valid.take([2], 0)[0]
    batch = task.inputs(task.collate([(frames, words)]))
    heads = list(range(task.heads))
    sites = [f"decoder.blocks.{n}.cross_attention" for n in range(task.decoder_layers)]
    found = mh.maps(model, batch, dict.fromkeys(sites, heads))
    seconds = len(frames) * task.join * HOP
    said = task._words(words.tolist())
    figure, axes = pyplot.subplots(
        1 + len(sites) * len(heads), 1, figsize=(9, 2 + 1.0 * len(sites) * len(heads)), sharex=True,
        gridspec_kw={"height_ratios": [2] + [1] * (len(sites) * len(heads))}, layout="constrained",
    )  # fmt: skip
    spectrum = frames.view(-1, task.mels).T
    axes[0].imshow(spectrum, aspect="auto", origin="lower", cmap="magma", extent=(0, seconds, 0, task.mels))
    axes[0].set_ylabel("bands")
    axes[0].set_title(
        f"What is heard: {' '.join(said)}, and where each head of the decoder looks to write it"
    )
    rows = [(site, head) for site in sites for head in heads]
    for axis, (site, head) in zip(axes[1:], rows, strict=True):
        weights = found[site].weights[0, head]  # (words, tokens)
        axis.imshow(weights, aspect="auto", cmap=ATTENTION, vmin=0, extent=(0, seconds, len(weights), 0))
        axis.set_yticks([n + 0.5 for n in range(len(weights))], [*said, "end"], fontsize=6)
        axis.set_ylabel(f"layer {site.split('.')[2]}\nhead {head}", fontsize=8)
    axes[-1].set_xlabel("seconds")
    save(figure, out / "speech-alignment.png")


def spread_of_heads(folder: str, data: str, out: Path) -> None:
    """How far the heads of the encoder look, and how widely: a dot for each."""
    task, model = tasks.load(folder)
    assert isinstance(task, Speech)
    examples = task.open(None if data == "none" else data).valid
    with torch.no_grad(), mh.watch(model, "full") as seen:
        for places in bucketed(examples.sizes, 4096):
            model(**task.inputs(task.collate(examples.take(places, 0))))
    table = seen.table
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    token = task.join * HOP
    for layer in range(task.layers):
        rows = [
            i
            for i, row in enumerate(table.rows)
            if row.kind == "self" and row.site.startswith(f"encoder.blocks.{layer}.")
        ]
        far, wide = table["distance"][rows] * token, table["effective_keys"][rows] * token
        axis.scatter(far, wide, label=f"layer {layer}", s=60)
        for row, x, y in zip(rows, far.tolist(), wide.tolist(), strict=True):
            axis.annotate(
                str(table.rows[row].head), (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8
            )
    axis.set_xlabel("how far a head looks on average, seconds")
    axis.set_ylabel("sound that it takes in at once, seconds")
    axis.legend()
    axis.set_title("The heads of the encoder, on strings of held-out takes")
    save(figure, out / "speech-heads.png")


def looked_at(folder: str, data: str, out: Path) -> None:
    """Held-out pictures, what is written about them, and which patches each word is read from."""
    task, model = tasks.load(folder)
    assert isinstance(task, Picturebook)
    examples = task.open(None if data == "none" else data).valid
    side = task.size // task.patch
    site = f"decoder.blocks.{task.decoder_layers - 1}.cross_attention"
    chosen = [0, 4, 8]  # in the first language, of two or of four
    rows: list[tuple[Tensor, list[str], Tensor]] = []
    for index in chosen:
        batch = task.collate(examples.take([index], 0))
        written = model.write(batch["pictures"], batch["ids"][:, 0], _end(task), task.max_tokens)  # type: ignore[operator]
        ids = torch.cat([batch["ids"][:, :1], written], 1)
        ids = ids[:, : int((ids == _end(task)).int().argmax()) or None]
        weights = mh.maps(
            model, {"source": batch["pictures"], "target": ids}, {site: list(range(task.heads))}
        )
        # a token is written at the place of the one before it
        tokens = [task.tokenizer.decode([number]).strip() for number in ids[0, 1:].tolist()]
        rows.append((batch["pictures"][0], tokens, weights[site].weights[0].mean(0)[: len(tokens)]))
    columns = 1 + max(len(tokens) for _, tokens, _ in rows)
    figure, axes = pyplot.subplots(
        len(rows), columns, figsize=(1.15 * columns, 1.45 * len(rows)), squeeze=False, layout="constrained"
    )
    for line, (picture, tokens, weights) in zip(axes, rows, strict=True):
        for axis in line:
            axis.axis("off")
        line[0].imshow(picture.permute(1, 2, 0))
        for axis, token, given in zip(line[1:], tokens, weights, strict=False):
            axis.imshow(picture.permute(1, 2, 0), alpha=0.35, extent=(0, side, side, 0))
            axis.imshow(given.view(side, side), cmap=ATTENTION, alpha=0.75, extent=(0, side, side, 0), vmin=0)
            axis.set_title(token, fontsize=9)
    save(figure, out / "picturebook-words.png")


def shared(folder: str, data: str, out: Path) -> None:
    """How each head of a single stream shares its words' attention between the picture and the text."""
    task, model = tasks.load(folder)
    assert isinstance(task, Picturebook)
    examples = task.open(None if data == "none" else data).valid
    batches = (task.inputs(task.collate(examples.take(p, 0))) for p in bucketed(examples.sizes, 4096))
    shares: Any = picture_shares(model, batches)  # type: ignore[arg-type]
    figure, axes = pyplot.subplots(
        1, len(shares), figsize=(2.2 * len(shares), 2.8), sharey=True, layout="constrained"
    )
    for number, (axis, layer) in enumerate(zip(axes, shares.tolist(), strict=True)):
        axis.bar(range(len(layer)), layer, color="#3b6fb6", label="picture")
        axis.bar(range(len(layer)), [1 - x for x in layer], bottom=layer, color="#e3c565", label="text")
        axis.set_title(f"layer {number}")
        axis.set_xticks(range(len(layer)))
        axis.set_xlabel("head")
    axes[0].set_ylabel("share of the words' attention")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    save(figure, out / "picturebook-shares.png")


def _end(task: Picturebook) -> int:
    number: int = task.tokenizer.token_to_id("<end>")
    return number


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(path)


if __name__ == "__main__":
    main()
