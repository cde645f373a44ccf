"""Without residual connections the signal dies: gradient at the start and loss after training, by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval, paired_difference
from manyheads.common.preserved_state import evaluating
from manyheads.nn.blocks import TransformerBlock
from manyheads.studies.block_gradients import block_gradients, first_batch
from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.fitting import Recipe, fit, new_model
from manyheads.studies.language_text import opened
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
    judge_effects,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Without residual connections the signal dies in a deep model: hardly any gradient reaches the "
        "first layer, and the model does not learn.",
        "没有残差连接，信号会在深层模型中消失：几乎没有梯度能到达第一层，模型学不会。",
    ),
    explanation=Words(
        "A layer with a residual connection adds to what it reads; a layer without one replaces it. Going "
        "back, the gradient of a sum is the sum of the gradients: with the connection the loss of the "
        "last layer reaches the first one along a road that no layer can block. Without it the gradient "
        "is multiplied by the derivative of every layer on its way, and a product of many factors below "
        "one is nearly zero.\n\n"
        "There is a second way to die. Attention takes averages of tokens. If each layer replaces the "
        "tokens by averages, all tokens soon look alike, and there is nothing left to tell them apart. "
        "Layer norm keeps the size of the numbers, but cannot bring this difference back.",
        "有残差连接的层在输入上相加，没有残差连接的层则替换输入。反向传播时，和的梯度等于梯度的和：有了残"
        "差连接，最后一层的损失可以沿着一条任何层都挡不住的路到达第一层。没有它，梯度在途中要乘以每一层的"
        "导数，许多小于一的因子相乘，结果几乎为零。\n\n"
        "信号还有第二种消失方式。注意力是对各词元取平均。如果每一层都用平均值替换词元，很快所有词元就会变"
        "得一样，再也无法区分。层归一化能保持数值的大小，却找不回这种差别。",
    ),
    formulas=(
        r"y=x+f(x)\;\Rightarrow\;\frac{\partial L}{\partial x}=\frac{\partial L}{\partial y}"
        r"\left(1+\frac{\partial f}{\partial x}\right)",
    ),
    rule=Words(
        "Language models of 2 to 48 layers with layer norm, with and without residual connections. Two "
        "effects: in the deepest model, how many times smaller the gradient of the first layer is at the "
        "start without the connections (at least 10 times, by the 95% interval over seeds); in the "
        "deepest model that is trained, how much higher its held-out loss is (above zero, by the "
        "interval). Holds if both are there, holds in part if one is, does not hold if both are absent; "
        "else it cannot be told.",
        "对 2 到 48 层、带层归一化的语言模型，比较有和没有残差连接。看两个效应：在最深的模型里，没有残差连"
        "接时第一层的初始梯度小多少倍（按各种子的 95% 区间，至少 10 倍）；在参加训练的最深的模型里，留出损"
        "失高多少（区间高于零）。两者都有则成立，只有其一则部分成立，两者都没有则不成立；否则无法判断。",
    ),
    caption=Words(
        "By the number of layers. Left: gradient of the first layer at the start. Middle: how different "
        "tokens still are after the last layer, at the start (1: as unlike as can be, 0: all the same). "
        "Right: held-out loss after training (nats a token). Bars: 95% interval over seeds.",
        "横轴为层数。左：初始时第一层的梯度。中：初始时经过最后一层后各词元还有多大差别（1 为完全不同，0 "
        "为全部相同）。右：训练后的留出损失（每词元奈特数）。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "He, Zhang, Ren and Sun 2016, Deep residual learning for image recognition.",
        "Dong, Cordonnier and Loukas 2021, Attention is not all you need: pure attention loses rank "
        "doubly exponentially with depth.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """Depths of the language model; those up to ``deepest_trained`` are also trained."""

    layers: tuple[int, ...] = (2, 4, 8, 16, 24, 48)
    deepest_trained: int = 16
    d_model: int = 32
    heads: int = 2
    context: int = 32
    steps: int = 100
    batch_tokens: int = 512


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, layers=(2, 6), deepest_trained=2, d_model=8, context=8, steps=2, batch_tokens=64),
    "quick": Setup(),
    "full": Setup(seeds=5, deepest_trained=24, d_model=64, heads=4, context=64, steps=200, batch_tokens=1024),
}
SMALLER = 10.0  # times, at least
SMALLEST = 1e-30  # what a gradient of zero counts as
EXAMPLES = 16  # of the batch whose gradient is measured

COLUMNS: Mapping[str, Words] = {
    "gradient": Words("gradient of the first layer", "第一层的梯度"),
    "difference": Words("difference between tokens", "词元之间的差别"),
    "loss": Words("held-out loss", "留出损失"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every depth, with and without residual connections, and seed."""
    return grid(setup, _measure, layers=setup.layers, residual=(True, False))


def _measure(setup: Setup, layers: int, residual: bool, seed: int) -> Row:
    task, data = opened(setup.data, setup.context)
    task.d_model, task.heads, task.layers = setup.d_model, setup.heads, layers
    model = new_model(task, seed)
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.residual = residual
    batch = first_batch(task, data, EXAMPLES, seed)
    row: Row = {
        "gradient": block_gradients(task, model, batch)[0],
        "difference": _difference(model, batch["ids"]),
        "loss": None,
    }
    if layers <= setup.deepest_trained:
        recipe = Recipe(steps=setup.steps, batch_tokens=setup.batch_tokens)
        row["loss"] = fit(task, data, model, recipe, seed).metrics()["loss"]
    return row


def _difference(model: nn.Module, ids: Tensor) -> float:
    """How unlike the tokens are after the last block: one minus the share that all have in common."""
    with evaluating(model), torch.no_grad():
        _, hidden = model(ids, return_hidden=True)
    tokens = nn.functional.normalize(hidden[-1].double().flatten(0, 1), dim=-1)
    return float(1 - tokens.mean(0).square().sum())


def figure(result: Result, language: Language) -> Figure:
    """Gradient, difference between tokens and loss by depth."""
    drawing, axes = panels(3)
    labels = {True: Words("with residual", "有残差连接"), False: Words("without", "没有残差连接")}
    for each, (column, title) in zip(axes, COLUMNS.items(), strict=True):
        depths = _depths(result, column)
        for number, (residual, label) in enumerate(labels.items()):
            points = {n: result.interval(column, layers=n, residual=residual) for n in depths}
            line(each, points, label[language], number)
        log_ticks(each, depths)
        each.set_xlabel(Words("layers", "层数")[language])
        each.set_title(title[language], fontsize=11, loc="left")
    axes[0].set_yscale("log")
    axes[1].set_ylim(0, 1.05)
    axes[1].legend(frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the gradient in the deepest model and by the loss of the deepest that was trained."""
    deepest, trained = _depths(result, "gradient")[-1], _depths(result, "loss")[-1]
    smaller = _orders_of_magnitude(result, deepest)
    worse = result.difference(
        "loss", {"layers": trained, "residual": False}, {"layers": trained, "residual": True}
    )
    share = f"{10**-smaller.mean:.2g}"
    numbers = Words(
        f"With {deepest} layers the first layer's gradient without residual connections is {share} times "
        f"that with them; with {trained} layers the loss after training is higher by {worse:.2f} nats a "
        f"token ({worse.count} seeds).",
        f"{deepest} 层时，没有残差连接的第一层梯度是有残差连接时的 {share} 倍；"
        f"{trained} 层时，训练后的损失每词元高 {worse:.2f} 奈特（{worse.count} 个随机种子）。",
    )
    return Judgement(judge_effects([(smaller, math.log10(SMALLER)), (worse, 0.0)]), numbers)


def _orders_of_magnitude(result: Result, layers: int) -> Interval:
    """By how many powers of ten the gradient is smaller without residual connections."""
    with_them, without = (
        {
            seed: math.log10(max(value, SMALLEST))
            for seed, value in result.values("gradient", layers=layers, residual=residual).items()
        }
        for residual in (True, False)
    )
    return paired_difference(with_them, without)


def _depths(result: Result, column: str) -> list[int]:
    """The numbers of layers at which a column was measured, in ascending order."""
    depths = {row["layers"] for row in result.rows if row.get(column) is not None}
    return sorted(n for n in depths if isinstance(n, int))
