"""Attention along a sequence: what every head looks at, place by place, of one sequence or of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.untouched import untouched
from manyheads.heads.call_rows import weight_rows
from manyheads.heads.calls import Call
from manyheads.heads.intercept import Interceptor
from manyheads.heads.maps import run
from manyheads.view.colour import RAMP
from manyheads.whole_files import write_whole

# More letters than this along one line are smaller than an eye can read: then every few are written.
MOST_LETTERS = 130
GREY, DARK = "#777777", "#222222"


@dataclass(frozen=True, eq=False)
class Along:
    """Where heads look.

    Attributes
    ----------
    heads: their names, layer.head, in the order of the model.
    weights: (heads, places), each row the mean attention on every place: it sums to one.
    """

    heads: list[str]
    weights: Tensor


def along(model: nn.Module, batches: Iterable[Any], query: int | None = None) -> Along:
    """The mean attention of every self-attention head on each place of sequences of one length.

    Parameters
    ----------
    model: any torch.nn.Module; run as it is, without gradients.
    batches: dicts, tuples or tensors; all sequences as long as each other, without padding.
    query: the place that looks, such as 0 for a class token; the mean over all places without it.

    Examples
    --------
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(12, heads=3, layers=2, vocabulary=7)
    >>> found = along(model, [torch.randint(7, (5, 11))], query=0)
    >>> found.heads[:4], found.weights.shape
    (['0.0', '0.1', '0.2', '1.0'], torch.Size([6, 11]))
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def see(call: Call) -> None:
        if call.site.cross:
            return
        with torch._C.DisableTorchFunction():
            wanted = list(range(call.queries)) if query is None else [query % call.queries]
            rows = (
                weight_rows(call, list(range(call.site.heads)), wanted).double().mean(2)
            )  # (batch, heads, keys)
            name, before = call.site.name, sums.get(call.site.name)
            if before is not None and before.shape[1] != rows.shape[2]:
                raise ValueError(
                    f"batches: sequences of {before.shape[1]} and of {rows.shape[2]} tokens; "
                    "expected one length"
                )
            sums[name] = rows.sum(0) if before is None else before + rows.sum(0)
            counts[name] = counts.get(name, 0) + len(rows)

    with untouched(model), torch.no_grad(), Interceptor(model, see):
        for batch in batches:
            run(model, batch)
    if not sums:
        raise ValueError("batches: no self-attention was seen; expected a transformer and at least one batch")
    names = [f"{layer}.{head}" for layer, total in enumerate(sums.values()) for head in range(len(total))]
    weights = torch.cat([total / counts[name] for name, total in sums.items()])
    return Along(names, weights.float().cpu())


def draw(panels: Sequence[tuple[str, Along, Sequence[str]]], path: Path, title: str) -> None:
    """Draw where heads look into a PNG file: a panel for each ``(name, attention, letters of the places)``.

    A row is a head, a column a place; the colour is the share of attention, by its square root.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    longest = max(found.weights.shape[1] for _, found, _ in panels)
    heights = [0.16 * len(found.heads) + 0.6 for _, found, _ in panels]
    size = (min(max(0.13 * longest + 1.6, 6.0), 18.0), sum(heights) + 0.8)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    ramp = LinearSegmentedColormap.from_list("attention", [[c / 255 for c in rgb] for rgb in RAMP])
    highest = max(float(found.weights.max()) for _, found, _ in panels)
    image: Any = None
    for axis, (name, found, letters) in zip(axes, panels, strict=True):
        norm = PowerNorm(0.5, 0, highest)
        image = axis.imshow(
            found.weights.numpy(), cmap=ramp, norm=norm, interpolation="nearest", aspect="auto"
        )
        step = -(-len(letters) // MOST_LETTERS)
        places = range(0, len(letters), step)
        axis.set_xticks(places, [letters[place] for place in places], fontsize=7, parse_math=False)
        axis.set_yticks(range(len(found.heads)), found.heads, fontsize=7)
        axis.tick_params(length=0, pad=2, colors=DARK)
        axis.set_title(name, fontsize=9, color=DARK, loc="left", parse_math=False)
        for edge in axis.spines.values():
            edge.set_visible(False)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.02, pad=0.01)
    bar.ax.tick_params(labelsize=7, colors=GREY, length=0)
    bar.set_label("share of attention", fontsize=8, color=GREY)
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=12, color=DARK, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_whole(path, png.getvalue())
