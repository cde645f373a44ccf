"""Pictures for docs/images.md, docs/series.md and docs/dna.md, from runs of training.

    python tools/task_pictures.py --runs FOLDER [--out docs/pictures]

FOLDER holds what the commands on these pages wrote: images, series and dna (`manyheads train TASK`), and what
`python -m bench.learn` left, etth1 and splice-0. What is not there is not drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

import manyheads as mh
from manyheads import tasks
from manyheads.data.examples import spread
from manyheads.heads.along_sequence import along
from manyheads.view.colour import RAMP
from manyheads.view.figures.along_sequence import draw

DARK, GREY = "#222222", "#777777"
SHOWN = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
PICTURES = 6
WINDOWS = 4


def every_head(model: nn.Module) -> dict[str | int, list[int]]:
    """All heads of a model, as `maps` takes them."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, mh.MultiHeadAttention):
            found[name] = list(range(part.heads))
    return found


def weights(model: nn.Module, batch: Any) -> Tensor:
    """The attention of every head, (batch, all heads, queries, keys)."""
    return torch.cat([found.weights for found in mh.maps(model, batch, every_head(model)).values()], 1)


def names(model: nn.Module) -> list[str]:
    """layer.head of every head."""
    return [f"{layer}.{head}" for layer, heads in enumerate(every_head(model).values()) for head in heads]


def images(run: Path, out: Path) -> None:
    """Which patches of some digits get attention, and where patches look from their own place."""
    task, model = tasks.load(run)
    held = tasks.held_out(run, task)
    batch = task.collate(held.take(spread(len(held), PICTURES), 0))
    rows, columns = (side // task.patch for side in task.shape[1:])
    seen = weights(model, task.inputs(batch))
    first = int(
        task.pooling == "first"
    )  # from the class token, or in the mean from all: (pictures, heads, patches)
    own = (seen[:, :, 0] if first else seen.mean(2))[:, :, first:].unflatten(2, (rows, columns))
    labels = names(model)
    figure, axes = panels(
        PICTURES, len(labels) + 1, 0.72, "the attention that every patch gets, for each head"
    )
    for i in range(PICTURES):
        axes[i][0].imshow(batch["pixels"][i, 0], cmap="Greys")
        for h, label in enumerate(labels):
            axes[i][h + 1].imshow(own[i, h], cmap=SHOWN, vmin=0)
            if i == 0:
                axes[i][h + 1].set_title(label, fontsize=8, color=DARK)
    save(figure, out / "images-patches.png")
    batch = task.collate(held.take(spread(len(held), 150), 0))
    between = weights(model, task.inputs(batch))[:, :, first:, first:].mean(0)
    offsets = torch.zeros(len(labels), 2 * rows - 1, 2 * columns - 1)
    times = torch.zeros(2 * rows - 1, 2 * columns - 1)
    for query in range(rows * columns):
        for key in range(rows * columns):
            down, right = key // columns - query // columns, key % columns - query % columns
            offsets[:, down + rows - 1, right + columns - 1] += between[:, query, key]
            times[down + rows - 1, right + columns - 1] += 1
    heads = task.heads
    figure, axes = panels(len(labels) // heads, heads, 1.5, "attention by offset, a patch at the centre")
    for h, label in enumerate(labels):
        axis = axes[h // heads][h % heads]
        axis.imshow(offsets[h] / times, cmap=SHOWN, vmin=0)
        axis.set_title(label, fontsize=9, color=DARK)
    save(figure, out / "images-offsets.png")


def series(run: Path, out: Path, name: str, data: str | None) -> None:
    """Some forecasts beside what came, and the mean attention of every head from patch to patch."""
    task, model = tasks.load(run)
    examples = tasks.held_out(run, task) if data is None else task.read(data)
    chosen = spread(len(examples), WINDOWS)
    batch = task.collate(examples.take(chosen, 0))
    with torch.no_grad():
        said = model(**task.inputs(batch))
    columns = list(task.scale)
    figure = Figure(figsize=(9.0, 1.7 * WINDOWS), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for i, axis in enumerate(figure.subplots(WINDOWS, 1)):
        mean, spread_ = task.scale[columns[chosen[i] % len(columns)]]
        past, came, forecast = (x[i] * spread_ + mean for x in (batch["x"], batch["y"], said))
        then = range(len(past), len(past) + len(came))
        axis.plot(past, color=GREY, linewidth=0.9)
        axis.plot(then, came, color=DARK, linewidth=1.2, label="what came")
        axis.plot(then, forecast, color="#c4377a", linewidth=1.6, label="forecast")
        axis.set_title(columns[chosen[i] % len(columns)], fontsize=9, color=DARK, loc="left")
        axis.tick_params(labelsize=7, colors=GREY, length=0)
        for edge in axis.spines.values():
            edge.set_visible(False)
        if i == 0:
            axis.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    save(figure, out / f"{name}-forecast.png")
    batch = task.collate(examples.take(spread(len(examples), 200), 0))
    seen, labels = weights(model, task.inputs(batch)).mean(0), names(model)
    apart = torch.arange(seen.shape[-1])[:, None] - torch.arange(seen.shape[-1])
    for h, label in enumerate(labels):  # of an even share, by the distance in tokens modulo three
        shares = [seen[h][(apart % 3 == rest) & (apart != 0)].mean() * seen.shape[-1] for rest in range(3)]
        print(f"{name} {label}: " + ", ".join(f"{share:.2f}" for share in shares))
    title = "mean attention from patch (row) to patch (column), the past at the left"
    figure, axes = panels(len(labels) // task.heads, task.heads, 1.8, title)
    for h, label in enumerate(labels):
        axis = axes[h // task.heads][h % task.heads]
        axis.imshow(seen[h], cmap=SHOWN, vmin=0)
        axis.set_title(label, fontsize=9, color=DARK)
    save(figure, out / f"{name}-heads.png")


def dna(run: Path, out: Path, name: str, data: str | None, places: Sequence[str] | None) -> None:
    """Where heads look: in the mean over each class, or on one sequence of each."""
    task, model = tasks.load(run)
    examples = tasks.held_out(run, task) if data is None else task.read(data)
    by_class: dict[str, list[Tensor]] = {label: [] for label in task.labels}
    for row, label in examples.take(range(len(examples)), 0):
        by_class[task.labels[int(label)]].append(row)
    drawn = []
    query = 0 if task.pooling == "first" else None
    letters = {number: token for token, number in task.vocabulary.items()}
    for label, rows in by_class.items():
        if places is None:
            shown = ["·" if n == 0 else letters[n] for n in rows[0].tolist()]
            drawn.append((label, along(model, [{"ids": rows[0][None]}], query=query), shown))
        else:
            found = along(model, [{"ids": torch.stack(rows)}], query=query)
            drawn.append((f"{label}: the mean over {len(rows)} sequences", found, places))
            for h, head in enumerate(found.heads):
                most = found.weights[h].topk(4)
                shown = zip(most.indices.tolist(), most.values.tolist(), strict=True)
                print(f"{label} {head}: " + ", ".join(f"{share:.0%} at {n + 1}" for n, share in shown))
    who = "from the class token" if query == 0 else "from all tokens, in the mean"
    draw(drawn, out / f"{name}.png", f"attention of every head on each place, {who}")


def panels(rows: int, columns: int, side: float, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(side * columns, side * rows + 0.5), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flatten():
        axis.axis("off")
    figure.suptitle(title, fontsize=11, color=DARK)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="the folder with series/ETTh1.csv, for etth1")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    given = parser.parse_args()
    runs, out = given.runs, given.out
    if (runs / "images").is_dir():
        images(runs / "images", out)
    if (runs / "series").is_dir():
        series(runs / "series", out, "series", None)
    if (runs / "etth1").is_dir() and given.data is not None:
        series(runs / "etth1", out, "etth1", str(given.data / "series" / "ETTh1.csv"))
    if (runs / "dna").is_dir():
        dna(runs / "dna", out, "dna-motifs", None, None)
    if (runs / "splice-0").is_dir():
        junction = [*(str(n) if n % 5 == 0 else "" for n in range(-30, 0)),
                    *(str(n) if n % 5 == 0 else "" for n in range(1, 31))]  # fmt: skip
        folder = str(runs / "splice-0-data" / "test.tsv")
        dna(runs / "splice-0", out, "dna-splice", folder, junction)


if __name__ == "__main__":
    main()
