"""The figure of a sweep: the metric against the number of heads."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

from manyheads.common.whole_files import write_whole
from manyheads.training.sweep_result import SweepResult

_COLOURS = ("#1f5fa8", "#b8560f", "#2a7f4f", "#8a3f8f", "#a8323e", "#606060")
_FAILED = "#a8323e"


def draw(result: SweepResult, path: Path) -> None:
    """Every seed as a point, means with their 95% intervals; a line for each setting of the other options."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg"):
        raise ValueError(f"path: got {path}; expected a name that ends in .png or .svg")
    options = result.settings[0].options
    counts = {name: len({setting.options[name] for setting in result.settings}) for name in options}
    across = max(counts, key=lambda name: (name == "heads") * (counts[name] > 1) or counts[name] / 1e6)
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in result.table:
        others = [f"{name} {row[name]}" for name in options if name != across and counts[name] > 1]
        lines.setdefault(", ".join(others), []).append(row)
    shift = 2 ** (0.08 / max(len(lines) - 1, 1))  # lines side by side, so that bars do not hide each other
    for number, (label, rows) in enumerate(lines.items()):
        colour, factor = _COLOURS[number % len(_COLOURS)], shift ** (number - (len(lines) - 1) / 2)
        measured = [row for row in sorted(rows, key=lambda row: row[across]) if row["seeds"]]
        xs = [row[across] * factor for row in measured]
        margins = [0.0 if math.isnan(row["high"]) else row["high"] - row["mean"] for row in measured]
        axes.errorbar(
            xs, [row["mean"] for row in measured], yerr=margins, fmt="o-", markersize=5, linewidth=1.6,
            elinewidth=1.0, capsize=3, color=colour, label=label,
        )  # fmt: skip
        for seed in result.seeds:  # a thin line joins the runs of a seed
            reached = {each.setting: each.value for each in result.outcomes if each.seed == seed}
            ys = [reached.get(row["setting"]) for row in measured]
            points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
            if points:
                style: dict[str, Any] = {"color": colour, "alpha": 0.4, "linewidth": 0.7, "markersize": 7}
                axes.plot(*zip(*points, strict=True), ".-", zorder=1, **style)
    values = sorted({setting.options[across] for setting in result.settings})
    for value in values:
        if failed := sum(row["failed"] for row in result.table if row[across] == value):
            where: dict[str, Any] = {"ha": "center", "transform": axes.get_xaxis_transform()}
            axes.text(value, 0.01, f"{failed} failed", color=_FAILED, fontsize=8, **where)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(f"{across} (log scale)")
    axes.set_xlim(values[0] / 1.2, values[-1] * 1.2)
    axes.set_ylabel(f"{result.metric} ({'higher' if result.higher_is_better else 'lower'} is better)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(frameon=False)
    held = {"parameters": "equal parameters", "compute": "equal compute"}.get(
        result.equal, "head width fixed"
    )
    most = max(row["seeds"] for row in result.table)
    bars = f"points: {most} seeds, bars: 95% interval of the mean" if most > 1 else "one seed"
    axes.set_title(f"{result.task}, {held}\n{bars}", loc="left", fontsize=11)
    image = BytesIO()
    with rc_context({"svg.hashsalt": "manyheads"}):
        figure.savefig(image, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    write_whole(path, image.getvalue())
