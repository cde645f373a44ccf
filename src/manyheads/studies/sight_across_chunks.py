"""Chunks cannot see across: recalling a token, by its distance; what windows and global tokens give back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from manyheads.common.intervals import Interval, interval
from manyheads.common.preserved_state import seed_generators
from manyheads.nn.transformers import Encoder
from manyheads.studies.drawing import line, panels
from manyheads.studies.result import Result
from manyheads.studies.sparse_patterns import pattern_mask
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Settings,
    Size,
    Words,
    judge_effects,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Attention inside chunks cannot see across them; windows and a few global tokens give most of "
        "that back.",
        "分块内的注意力看不到块外；窗口和少数全局词元能挽回大部分损失。",
    ),
    explanation=Words(
        "Cutting a text into chunks makes attention cheap, but a token of one chunk never hears of the "
        "other chunks, however many layers there are. With a window each token sees its neighbours, and "
        "these see theirs: after two layers news has travelled two windows, after L layers L windows. A "
        "global token sees and is seen by all: two layers are enough for any distance.\n\n"
        "The task here: one token of a row is marked and carries a value, the last token has to name it. "
        "All others are noise. Who cannot reach the marked token can only guess.",
        "把文本切成块，注意力就便宜了，但一块里的词元永远听不到其他块的消息，不管有多少层。用窗口时，每个"
        "词元看到邻居，邻居又看到它们的邻居：两层之后消息传过两个窗口，L 层之后传过 L 个窗口。全局词元能看"
        "到所有词元，也被所有词元看到：任何距离都只需要两层。\n\n"
        "这里的任务是：一行里有一个词元带有标记和一个值，最后一个词元要说出这个值，其余都是噪声。够不到带"
        "标记的词元时，就只能猜。",
    ),
    formulas=(
        r"\mathrm{reach}:\quad \mathrm{chunk}\ c\qquad \mathrm{window}\ L\,(w-1)\qquad "
        r"\mathrm{global}\ \infty\ (L\geq 2)",
    ),
    rule=Words(
        "Encoders learn with full attention, chunks, windows, windows with global tokens; accuracy is "
        "measured by distance. If full attention recalls less than 90% at the farthest distances, it "
        "cannot be told. Else three statements, each by 95% intervals over seeds: beyond the chunk, "
        "accuracy with chunks is less than 10 points above guessing; at one to two window sizes, windows "
        "give back more than half of what chunks lose; at the farthest distances, global tokens do. Holds "
        "if all three hold, in part if some do, does not hold if none does; else it cannot be told.",
        "训练使用完整注意力、分块、窗口、窗口加全局词元的编码器，按距离测准确率。若完整注意力在最远距离上"
        "的准确率低于 90%，则无法判断。否则看三个陈述，都按各种子的 95% 区间判断：块外的距离上，分块的准确"
        "率比瞎猜高不到 10 个百分点；距离为窗口大小的一到两倍时，窗口挽回分块所失的一半以上；在最远的距离"
        "上，全局词元也能做到。三个都成立则成立，有些成立则部分成立，没有一个成立则不成立；否则无法判断。",
    ),
    caption=Words(
        "Accuracy by the distance to the marked token, a panel for every size of chunk and window. The "
        "dashed line is guessing. Bars: 95% interval over seeds.",
        "准确率随到带标记词元的距离的变化，每个块（窗口）大小一幅图。虚线是瞎猜的准确率。误差线：各随机种"
        "子的 95% 区间。",
    ),
    sources=(
        "Beltagy, Peters and Cohan 2020, Longformer: the long-document transformer.",
        "Zaheer and others 2020, Big Bird: transformers for longer sequences.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The rows, the sizes of chunks and windows, and the encoder."""

    length: int = 32
    sizes: tuple[int, ...] = (4, 8)
    global_tokens: int = 2
    values: int = 8
    d_model: int = 32
    heads: int = 2
    layers: int = 2
    steps: int = 300
    batch: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if (most := self.length // 2) < max(self.sizes):
            raise ValueError(f"sizes: expected at most half the length, {most}, got {self.sizes}")


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, length=16, sizes=(4,), d_model=8, layers=2, steps=2, batch=4),
    "quick": Setup(),
    "full": Setup(seeds=3, length=128, sizes=(16, 32, 64), d_model=64, heads=4, layers=3, steps=600),
}
PATTERNS = {
    "full": Words("full attention", "完整注意力"),
    "chunk": Words("chunks", "分块"),
    "window": Words("windows", "窗口"),
    "global": Words("windows and global tokens", "窗口加全局词元"),
}
LEARNED, ABOVE_GUESSING, RESTORED = 0.9, 0.1, 0.5
TESTED = 16  # rows for every distance

COLUMNS: Mapping[str, Words] = {"accuracy": Words("accuracy", "准确率")}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every pattern, its size, and seed; full attention has the length as its size."""
    patterns = [("full", setup.length)] + [
        (pattern, size) for size in setup.sizes for pattern in PATTERNS if pattern != "full"
    ]
    return [
        Part({"pattern": pattern, "size": size, "seed": seed}, partial(_measure, setup, pattern, size, seed))
        for seed in range(setup.seeds)
        for pattern, size in patterns
    ]


def _rows(setup: Setup, distances: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of noise ``(rows, length)`` with one marked token so far from the last, and its value."""
    values = torch.randint(setup.values, distances.shape, generator=random)
    ids = torch.randint(setup.values, (len(distances), setup.length), generator=random)
    ids[torch.arange(len(ids)), setup.length - 1 - distances] = setup.values + values
    ids[:, -1] = 2 * setup.values
    return ids, values


def _measure(setup: Setup, pattern: str, size: int, seed: int) -> list[Row]:
    seed_generators(seed)
    vocabulary = 2 * setup.values + 1
    encoder = Encoder(setup.d_model, setup.heads, setup.layers, vocabulary=vocabulary, positions="none")
    naming = nn.Linear(setup.d_model, setup.values)
    allowed = pattern_mask(pattern, size, setup.length, setup.global_tokens)
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *naming.parameters()], betas=(0.9, 0.98))
    rate = OneCycleLR(optimizer, 3e-3, setup.steps, pct_start=0.2, cycle_momentum=False)
    for _ in range(setup.steps):
        # as many short distances as long ones, on a logarithmic scale: those in reach must not be rare
        distances = (setup.length ** torch.rand(setup.batch, generator=random)).long()
        ids, values = _rows(setup, distances, random)
        loss = F.cross_entropy(naming(encoder(ids, mask=allowed)[:, -1]), values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    with torch.no_grad():
        ids, values = _rows(setup, torch.arange(1, setup.length).repeat_interleave(TESTED), random)
        right = (naming(encoder(ids, mask=allowed)[:, -1]).argmax(-1) == values).double()
    return [
        {"from_distance": low, "accuracy": float(right[(low - 1) * TESTED : (high - 1) * TESTED].mean())}
        for low, high in pairwise(_bounds(setup.length))
    ]


def _bounds(length: int) -> list[int]:
    """Ranges of distances: each begins where the one before ends, and is twice as long.

    >>> _bounds(64)
    [1, 4, 8, 16, 32, 64]
    """
    return [1, *(2**power for power in range(2, 30) if 2**power < length), length]


def figure(result: Result, language: Language) -> Figure:
    """Accuracy by distance, a panel for every size."""
    length, sizes, values = _shape(result)
    drawing, axes = panels(len(sizes), height=4.0)
    starts = _bounds(length)[:-1]
    for each, size in zip(axes, sizes, strict=True):
        for number, (pattern, words) in enumerate(PATTERNS.items()):
            at = length if pattern == "full" else size
            points = {
                float(n): result.interval("accuracy", pattern=pattern, size=at, from_distance=start)
                for n, start in enumerate(starts)
            }
            line(each, points, words[language], number, "s:" if pattern == "global" else "o-")
        each.axhline(1 / values, color="#777777", linestyle="--", linewidth=1)
        each.set_xticks(range(len(starts)), [f"{low}-{high - 1}" for low, high in pairwise(_bounds(length))])
        each.set_ylim(0, 1.05)
        each.set_xlabel(Words("distance (tokens)", "距离（词元）")[language])
        each.set_title(
            Words(f"chunks and windows of {size}", f"块与窗口的大小：{size}")[language], fontsize=11
        )
    axes[0].set_ylabel(COLUMNS["accuracy"][language])
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
    return drawing


def verdict(result: Result) -> Judgement:
    """By what chunks lose beyond their end, and by how much of it windows and global tokens give back."""
    length, sizes, values = _shape(result)
    starts = _bounds(length)[:-1]
    full = _mean(result, [("full", length, starts[-1])])
    beyond = _mean(result, [("chunk", size, start) for size in sizes for start in starts if start >= size])
    blind = interval(1 / values + ABOVE_GUESSING - value for value in beyond.values())
    by_window = _restored(result, "window", {size: size for size in sizes})
    by_global = _restored(result, "global", dict.fromkeys(sizes, starts[-1]))
    mean_full, mean_beyond = (sum(each.values()) / len(each) for each in (full, beyond))
    numbers = Words(
        f"Full attention recalls {mean_full:.0%} at the farthest distances; beyond the chunk, chunks recall "
        f"{mean_beyond:.0%} (guessing: {1 / values:.0%}). Windows give back {by_window.mean:.0%} of the "
        f"loss at one to two window sizes, global tokens {by_global.mean:.0%} at the farthest distances "
        f"({blind.count} seeds).",
        f"完整注意力在最远距离上的准确率为 {mean_full:.0%}；块外的距离上，分块为 {mean_beyond:.0%}"
        f"（瞎猜为 {1 / values:.0%}）。距离为窗口大小的一到两倍时，窗口挽回损失的 {by_window.mean:.0%}；"
        f"在最远的距离上，全局词元挽回 {by_global.mean:.0%}（{blind.count} 个随机种子）。",
    )
    together = judge_effects([(blind, 0.0), (by_window, RESTORED), (by_global, RESTORED)])
    return Judgement(together if mean_full >= LEARNED else "cannot be told", numbers)


def _mean(result: Result, cells: Sequence[tuple[str, int, int]]) -> dict[int, float]:
    """The mean accuracy over some patterns, sizes and first distances, by seed."""
    columns = [result.values("accuracy", pattern=p, size=s, from_distance=d) for p, s, d in cells]
    seeds = sorted(set.intersection(*(set(column) for column in columns)))
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in seeds}


def _restored(result: Result, pattern: str, starts: Mapping[int, int]) -> Interval:
    """How much of what chunks lose a pattern gives back, at one range of distances for each size."""
    whole, lost, back = (
        _mean(
            result, [(kind, _shape(result)[0] if kind == "full" else size, starts[size]) for size in starts]
        )
        for kind in ("full", "chunk", pattern)
    )
    return interval((back[seed] - lost[seed]) / max(whole[seed] - lost[seed], 1e-3) for seed in sorted(back))


def _shape(result: Result) -> tuple[int, list[int], int]:
    """The length of a row, the sizes of chunks and windows, and the number of values."""
    sizes = {int(row["size"] or 0) for row in result.rows if row["pattern"] != "full"}
    length = max(int(row["size"] or 0) for row in result.where(pattern="full"))
    return length, sorted(sizes), int(str(result.settings["values"]))
