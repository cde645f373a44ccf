"""Splitting costs nothing: parameters, multiply-adds and output variance are those of one head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from manyheads.common.preserved_state import seed_generators
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Settings, Size, Words, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Splitting attention into heads costs nothing: parameters, multiply-adds and the variance of the "
        "output at the start do not depend on the number of heads.",
        "把注意力分成多个头不需要额外代价：参数量、乘加次数和初始时输出的方差都与头数无关。",
    ),
    explanation=Words(
        "With h heads every head is d/h wide, so that all heads together have the same projections as one "
        "head. The scores are h products of width d/h instead of one of width d, which is the same number "
        "of multiplications. Only the softmax is computed h times.\n\n"
        "The variance is another matter: an average over n keys with equal weights has variance 1/n, and "
        "how equal the weights are depends on the scores. Dividing the scores by the square root of the "
        "width keeps them equally large for every number of heads.",
        "有 h 个头时，每个头的宽度是 d/h，所有头的投影合起来与一个头一样大。注意力分数是 h 个宽度为 d/h 的"
        "乘积，而不是一个宽度为 d 的乘积，乘法次数相同。只有 softmax 要计算 h 次。\n\n"
        "方差则不同：对 n 个键取等权平均，方差是 1/n；权重有多均匀取决于分数的大小。分数除以宽度的平方根，"
        "使得它们在任何头数下都一样大。",
    ),
    formulas=(
        r"4\,d^2\ \mathrm{parameters},\quad 2\,n\,(4\,d^2)+2\,(2\,n^2 d)\ \mathrm{operations}",
        r"\mathrm{MultiHead}(x)=[o_1,\dots,o_h]\,W_o,\qquad o_i\in R^{n\times d/h}",
    ),
    rule=Words(
        "Holds if parameters and multiply-adds are equal for all numbers of heads and the standard "
        "deviation of the output differs by less than 10% between them; holds in part if only the first "
        "two are equal.",
        "若所有头数下参数量与乘加次数相等，且输出标准差相差不到 10%，则成立；若只有前两项相等，则部分成立。",
    ),
    caption=Words(
        "Left: parameters and multiply-adds, relative to one head. Right: standard deviation of the "
        "output of a new module on random input, with the interval over seeds.",
        "左：参数量和乘加次数（以一个头为 1）。右：新建模块在随机输入上的输出标准差，以及各随机种子的区间。",
    ),
    sources=("Vaswani and others 2017, Attention is all you need, section 3.2.2.",),
)


@dataclass(frozen=True)
class Setup(Settings):
    """Sizes of the module and of its input."""

    seeds: int = 5
    heads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    d_model: int = 512
    length: int = 256
    batch: int = 4


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, heads=(1, 2, 4), d_model=16, length=8, batch=2),
    "quick": Setup(),
    "full": Setup(seeds=20, d_model=768, length=512),
}
LARGEST_DIFFERENCE = 0.1

COLUMNS: Mapping[str, Words] = {
    "parameters": Words("parameters", "参数量"),
    "multiply_adds": Words("multiply-adds", "乘加次数"),
    "output_deviation": Words("standard deviation of the output", "输出的标准差"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every number of heads and seed."""
    return grid(setup, _measure, heads=setup.heads)


def _measure(setup: Setup, heads: int, seed: int) -> Row:
    seed_generators(seed)
    module = MultiHeadAttention(setup.d_model, heads=heads).eval()
    x = torch.randn(setup.batch, setup.length, setup.d_model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = module(x)
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "multiply_adds": counter.get_total_flops() // 2,
        "output_deviation": float(output.std()),
    }


def figure(result: Result, language: Language) -> Figure:
    """Cost and output by the number of heads."""
    drawing, (left, right) = panels(2)
    heads = [int(h) for h in result.distinct("heads") if isinstance(h, int)]
    for number, column in enumerate(("parameters", "multiply_adds")):
        one = result.interval(column, heads=heads[0]).mean
        points = {h: result.interval(column, heads=h) for h in heads}
        style = ("o-", "s--")[number]
        left.plot(
            heads, [points[h].mean / one for h in heads], style, label=COLUMNS[column][language], markersize=5
        )
    left.set_ylim(0, 1.5)
    left.legend(frameon=False)
    left.set_ylabel(Words("relative to one head", "相对于一个头")[language])
    line(right, {h: result.interval("output_deviation", heads=h) for h in heads})
    right.set_ylim(bottom=0)
    right.set_ylabel(COLUMNS["output_deviation"][language])
    for axes in (left, right):
        log_ticks(axes, heads)
        axes.set_xlabel(Words("heads", "头数")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By equality, and by the spread of the output's standard deviation."""
    heads = result.distinct("heads")
    equal = len({row["parameters"] for row in result.rows}) == 1
    equal &= len({row["multiply_adds"] for row in result.rows}) == 1
    means = [result.interval("output_deviation", heads=h).mean for h in heads]
    spread = max(means) / min(means) - 1
    numbers = Words(
        f"Parameters and multiply-adds are {'equal' if equal else 'not equal'} for {_listed(heads)} heads; "
        f"the standard deviation of the output differs by at most {spread:.1%}.",
        f"{_listed(heads)} 个头的参数量和乘加次数{'相等' if equal else '不相等'}；"
        f"输出的标准差最多相差 {spread:.1%}。",
    )
    if not equal:
        return Judgement("does not hold", numbers)
    return Judgement("holds" if spread < LARGEST_DIFFERENCE else "holds in part", numbers)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
