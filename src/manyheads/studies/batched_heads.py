"""One big matrix equals many small ones: the same numbers, and batched heads are faster than a loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.common.intervals import Interval, interval
from manyheads.nn.attention import attention
from manyheads.studies.drawing import COLOURS, GREY, line, log_ticks, panels
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Settings,
    Size,
    Words,
    grid,
    judge_effect,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "One big matrix that is split into heads computes the same as one small matrix for each head, and "
        "computing all heads at once is faster than a loop over them.",
        "一个大矩阵再切分成多个头，与每个头各用一个小矩阵，结果相同；把所有头一起计算，比逐个循环更快。",
    ),
    explanation=Words(
        "Papers write multi-head attention with one small matrix for each head; programs use one big "
        "matrix for all. Stack the small ones side by side and you have the big one: each column of a "
        "product depends on its own column of the matrix only. At the end it is the same the other way "
        "round: the big output matrix times all heads is the sum of its parts times each head.\n\n"
        "So the numbers agree up to rounding, and so do the gradients. Speed is another matter. A "
        "processor is at its best in one large product; a loop starts many small ones, each too small to "
        "keep it busy.",
        "论文里的多头注意力为每个头写一个小矩阵；程序里所有头共用一个大矩阵。把小矩阵并排拼起来就是大矩阵"
        "：乘积的每一列只取决于矩阵中对应的那一列。最后的输出投影反过来也一样：大输出矩阵乘以所有头，等于"
        "它的各个部分分别乘以各个头再相加。\n\n"
        "所以数值只差舍入误差，梯度也是如此。速度则不同：处理器做一次大的乘法效率最高；循环要启动许多小乘"
        "法，每一个都小得无法让处理器满负荷工作。",
    ),
    formulas=(
        r"x\,[W_1,\dots,W_h]=[x\,W_1,\dots,x\,W_h],\qquad "
        r"[o_1,\dots,o_h]\,W^O=\sum_{i=1}^{h} o_i\,W^O_i",
    ),
    rule=Words(
        "Both are computed with the same weights, outputs and gradients, for several numbers of heads. "
        "Does not hold if a number differs by more than 0.00001 of the largest. Otherwise the largest "
        "number of heads decides: holds if the loop takes longer (the 95% interval of the ratio of times "
        "is above one), holds in part if it does not, else it cannot be told.",
        "用相同的权重、不同的头数分别计算两种写法的输出和梯度。若有数值之差超过最大值的 0.00001，则不成立"
        "。否则看最大的头数：若循环更慢（时间之比的 95% 区间高于一），则成立；若并不更慢，则部分成立；否则"
        "无法判断。",
    ),
    caption=Words(
        "Left: the largest difference between looped and batched heads, relative to the largest number "
        "(less than 1e-8 is drawn at 1e-8). Right: how many times longer the loop takes, forward and "
        "backward. Bars: 95% interval over seeds.",
        "左：逐个循环与一起计算的最大差别（相对于最大的数；小于 1e-8 的画在 1e-8 处）。右：循环所需时间是"
        "一起计算的多少倍（前向加反向）。误差线：各随机种子的 95% 区间。",
    ),
    sources=("Vaswani and others 2017, Attention is all you need, section 3.2.2.",),
)


@dataclass(frozen=True)
class Setup(Settings):
    """Sizes of the layer and its input, and how often each is timed; the shortest time counts."""

    seeds: int = 5
    heads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    d_model: int = 256
    length: int = 64
    batch: int = 4
    repeats: int = 40


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, heads=(1, 4), d_model=16, length=8, batch=2, repeats=2),
    "quick": Setup(),
    "full": Setup(d_model=768, length=256, heads=(1, 2, 4, 8, 16, 32, 64), repeats=30),
}
SAME = 1e-5
FLOOR = 1e-8

COLUMNS: Mapping[str, Words] = {
    "output_difference": Words("difference of the outputs", "输出之差"),
    "gradient_difference": Words("difference of the gradients", "梯度之差"),
    "looped_seconds": Words("seconds, looped", "循环（秒）"),
    "batched_seconds": Words("seconds, batched", "一起计算（秒）"),
}
Layer = Callable[[Tensor, list[Tensor], int], Tensor]


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every number of heads and seed."""
    return grid(setup, _measure, heads=setup.heads)


def batched(x: Tensor, matrices: list[Tensor], heads: int) -> Tensor:
    """All heads at once: x (batch, length, d_model), four matrices (d_model, d_model)."""
    query, key, value, output = matrices
    q, k, v = ((x @ matrix).unflatten(2, (heads, -1)).transpose(1, 2) for matrix in (query, key, value))
    return attention(q, k, v).transpose(1, 2).flatten(2) @ output


def looped(x: Tensor, matrices: list[Tensor], heads: int) -> Tensor:
    """One head after the other: four small matrices for each, head by head."""
    total = torch.zeros_like(x)
    for head in range(heads):
        query, key, value, output = matrices[4 * head : 4 * head + 4]
        q, k, v = ((x @ matrix).unsqueeze(1) for matrix in (query, key, value))
        total = total + attention(q, k, v).squeeze(1) @ output
    return total


def split(matrices: list[Tensor], heads: int) -> list[Tensor]:
    """The small matrices of every head: columns of queries, keys and values, rows of the output."""
    *inputs, output = matrices
    columns = [matrix.chunk(heads, 1) for matrix in inputs]
    rows = output.chunk(heads, 0)
    return [part.contiguous() for head in zip(*columns, rows, strict=True) for part in head]


def _measure(setup: Setup, heads: int, seed: int) -> Row:
    random = torch.Generator().manual_seed(seed)
    size = setup.d_model
    x = torch.randn(setup.batch, setup.length, size, generator=random)
    big = [torch.randn(size, size, generator=random) / math.sqrt(size) for _ in range(4)]
    small = split(big, heads)
    output, gradients = _run(batched, x, big, heads)
    looped_output, looped_gradients = _run(looped, x, small, heads)
    expected = split(gradients, heads)
    differences = [_relative(a, b) for a, b in zip(looped_gradients, expected, strict=True)]
    seconds = {"looped": math.inf, "batched": math.inf}
    for _ in range(setup.repeats):  # in turn, so that both meet the same load
        for name, layer, matrices in (("looped", looped, small), ("batched", batched, big)):
            begin = time.perf_counter()
            _run(layer, x, matrices, heads)
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return {
        "output_difference": _relative(looped_output, output),
        "gradient_difference": max(differences),
        "looped_seconds": seconds["looped"],
        "batched_seconds": seconds["batched"],
    }


def _run(layer: Layer, x: Tensor, matrices: list[Tensor], heads: int) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradient of half its sum of squares with respect to every matrix."""
    leaves = [matrix.detach().requires_grad_() for matrix in matrices]
    output = layer(x, leaves, heads)
    return output.detach(), list(torch.autograd.grad(output.square().sum() / 2, leaves))


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def figure(result: Result, language: Language) -> Figure:
    """Differences and the ratio of times by the number of heads."""
    drawing, (left, right) = panels(2)
    heads = [int(h) for h in result.distinct("heads") if isinstance(h, int)]
    for number, column in enumerate(("output_difference", "gradient_difference")):
        points = [max(FLOOR, *result.values(column, heads=h).values()) for h in heads]
        style, colour = ("o-", "s--")[number], COLOURS[number]
        left.plot(heads, points, style, color=colour, label=COLUMNS[column][language], markersize=4)
    left.axhline(SAME, color=GREY, linestyle="--", linewidth=1)
    left.set_yscale("log")
    left.set_ylim(FLOOR / 2, 1e-4)
    left.legend(frameon=False, loc="upper left")
    left.set_ylabel(Words("largest relative difference", "最大相对差别")[language])
    line(right, {h: _slowdown(result, h) for h in heads})
    right.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    right.set_ylim(bottom=0)
    right.set_ylabel(Words("time of the loop / time of the batch", "循环时间 / 一起计算的时间")[language])
    for axes in (left, right):
        log_ticks(axes, heads)
        axes.set_xlabel(Words("heads", "头数")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the largest difference, then by the ratio of times at the largest number of heads."""
    columns = ("output_difference", "gradient_difference")
    differences = [value for row in result.rows for name in columns if isinstance(value := row[name], float)]
    most = max(int(h) for h in result.distinct("heads") if isinstance(h, int))
    slowdown = _slowdown(result, most)
    numbers = Words(
        f"Outputs and gradients differ by at most {max(differences):.0e} of the largest number. With {most} "
        f"heads the loop takes {slowdown:.2f} times as long ({slowdown.count} seeds).",
        f"输出和梯度之差最多为最大数的 {max(differences):.0e}。{most} 个头时，循环所需时间是一起计算的 "
        f"{slowdown:.2f} 倍（{slowdown.count} 个随机种子）。",
    )
    if not all(difference <= SAME for difference in differences):  # NaN is not the same, either
        return Judgement("does not hold", numbers)
    slower = judge_effect(slowdown, 1.0)
    return Judgement("holds in part" if slower == "does not hold" else slower, numbers)


def _slowdown(result: Result, heads: int) -> Interval:
    """How many times longer the loop takes, by seed."""
    times, shortest = (result.values(f"{name}_seconds", heads=heads) for name in ("looped", "batched"))
    return interval(times[seed] / shortest[seed] for seed in times)
