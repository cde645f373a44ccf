"""Pre-norm keeps the road clear, post-norm does not: gradient by depth, and what trains without warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from manyheads.common.intervals import interval, paired_difference
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
    Value,
    Words,
    judge_effects,
)  # fmt: skip
from manyheads.training.task import Data, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Layer norm before each sublayer keeps the road for the gradient clear; after it, it does not, "
        "and deep models then need a warm-up of the learning rate.",
        "把层归一化放在每个子层之前，梯度的道路就保持畅通；放在之后则不然，深层模型因此需要学习率预热。",
    ),
    explanation=Words(
        "The first transformers added and then normalised (post-norm): everything that goes from one "
        "layer to the next passes a norm, and so does every gradient on its way back. Pre-norm normalises "
        "only what a sublayer reads. The sum itself, the residual stream, is never touched, and a "
        "gradient can walk from the last layer to the first without meeting a norm.\n\n"
        "With post-norm each norm divides by the size of a sum of two equal parts, which makes the "
        "gradient smaller by about the square root of two each time. The last layers then have large "
        "gradients and the first ones small ones. A large learning rate at the start moves the last "
        "layers too far. Warm-up, which begins with tiny steps, is the usual cure.",
        "最早的 Transformer 先相加、再归一化（后归一化）：从一层传到下一层的一切都要经过归一化，返回的梯度"
        "也一样。前归一化只对子层的输入作归一化，相加的主干（残差流）不受影响，梯度可以从最后一层一直走到"
        "第一层，途中不遇到任何归一化。\n\n"
        "后归一化时，每次都要除以两个大小相当的部分之和的尺度，梯度每次大约缩小到根号二分之一。于是最后几"
        "层梯度大，最初几层梯度小。一开始学习率就很大，会把最后几层推得太远。从很小的步子开始的预热是常用"
        "的补救办法。",
    ),
    formulas=(r"\mathrm{pre}:\ y=x+f(\mathrm{norm}(x))\qquad \mathrm{post}:\ y=\mathrm{norm}(x+f(x))",),
    rule=Words(
        "Three statements on the deepest models, each by 95% intervals over seeds. Gradient: at the "
        "start, the first layer's gradient divided by the last layer's is at least twice as large with "
        "pre-norm. Training: at the greatest learning rate without warm-up, post-norm's held-out loss is "
        "higher. Warm-up: with it, this gap is smaller. Holds if all three hold, holds in part if some "
        "do, does not hold if none does; else it cannot be told.",
        "对最深的模型看三个陈述，都按各种子的 95% 区间判断。梯度：初始时，第一层与最后一层的梯度之比，前归"
        "一化至少是后归一化的两倍。训练：在最大的学习率下且没有预热时，后归一化的留出损失更高。预热：有预"
        "热时，这个差距更小。三个都成立则成立，有些成立则部分成立，没有一个成立则不成立；否则无法判断。",
    ),
    caption=Words(
        "Left: gradient of the first layer divided by that of the last, at the start, by the number of "
        "layers. Others: held-out loss after training (nats a token) by learning rate, at each depth. "
        "Bars: 95% interval over seeds.",
        "左：初始时第一层与最后一层的梯度之比，横轴为层数。其余：各深度下训练后的留出损失（每词元奈特数）"
        "，横轴为学习率。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Xiong and others 2020, On layer normalization in the transformer architecture.",
        "Vaswani and others 2017, Attention is all you need, section 5.3 (warm-up).",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """Depths at which gradients are measured, and depths and learning rates that are trained."""

    layers: tuple[int, ...] = (2, 4, 12, 24)
    trained_layers: tuple[int, ...] = (2, 12)
    rates: tuple[float, ...] = (1e-3, 5e-3)
    d_model: int = 32
    heads: int = 2
    context: int = 32
    steps: int = 60
    batch_tokens: int = 512


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(
        seeds=2, layers=(1, 3), trained_layers=(1, 2), d_model=8, context=8, steps=3, batch_tokens=64
    ),
    "quick": Setup(),
    "full": Setup(
        seeds=3, layers=(2, 4, 6, 12, 24, 48), trained_layers=(2, 6, 12), rates=(5e-4, 2e-3, 5e-3),
        d_model=64, heads=4, context=64, steps=200, batch_tokens=1024,
    ),
}  # fmt: skip
LARGER = 2.0  # times, at least
WARM = 1 / 3  # share of the steps over which the rate rises
EXAMPLES = 16  # of the batch whose gradient is measured
NORMS = {"pre": Words("pre-norm", "前归一化"), "post": Words("post-norm", "后归一化")}

COLUMNS: Mapping[str, Words] = {
    "gradient_ratio": Words("gradient, first / last layer", "梯度之比，第一层 / 最后一层"),
    "loss": Words("held-out loss", "留出损失"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """For every norm, depth and seed: a part for the gradient, and one for every way to train."""
    listed = []
    for seed in range(setup.seeds):
        for norm in NORMS:
            for layers in setup.layers:
                key: Row = {"norm": norm, "layers": layers, "rate": None, "warmup": None, "seed": seed}
                listed.append(Part(key, partial(_ratio, setup, norm, layers, seed)))
            for layers in setup.trained_layers:
                for rate in setup.rates:
                    for warm in (True, False):
                        key = {"norm": norm, "layers": layers, "rate": rate, "warmup": warm, "seed": seed}
                        listed.append(Part(key, partial(_train, setup, norm, layers, rate, warm, seed)))
    return listed


def _model(setup: Setup, norm: str, layers: int, seed: int) -> tuple[Task, Data, nn.Module]:
    task, data = opened(setup.data, setup.context)
    task.d_model, task.heads, task.layers, task.norm = setup.d_model, setup.heads, layers, norm
    return task, data, new_model(task, seed)


def _ratio(setup: Setup, norm: str, layers: int, seed: int) -> Row:
    task, data, model = _model(setup, norm, layers, seed)
    gradients = block_gradients(task, model, first_batch(task, data, EXAMPLES, seed))
    return {"gradient_ratio": gradients[0] / gradients[-1]}


def _train(setup: Setup, norm: str, layers: int, rate: float, warm: bool, seed: int) -> Row:
    task, data, model = _model(setup, norm, layers, seed)
    warmup = round(WARM * setup.steps) if warm else 0
    recipe = Recipe(setup.steps, setup.batch_tokens, learning_rate=rate, warmup=warmup)
    return {"loss": fit(task, data, model, recipe, seed).metrics()["loss"]}


def figure(result: Result, language: Language) -> Figure:
    """The ratio of gradients by depth, and the loss by learning rate, a panel for every depth."""
    trained, rates = _numbers(result, "layers", "loss"), _numbers(result, "rate", "loss")
    drawing, axes = panels(1 + len(trained), height=4.2)
    depths = _numbers(result, "layers", "gradient_ratio")
    for number, norm in enumerate(NORMS):
        points = {n: result.interval("gradient_ratio", norm=norm, layers=n, rate=None) for n in depths}
        line(axes[0], points, None, number)
        for each, layers in zip(axes[1:], trained, strict=True):
            for warm, words in _WARM_WORDS.items():
                label = f"{NORMS[norm][language]}{words[language]}"
                key: Row = {"norm": norm, "layers": layers, "warmup": warm}
                losses = {r: result.interval("loss", **key, rate=r) for r in rates}
                line(each, losses, label, number, "o-" if warm else "s:")
            log_ticks(each, rates)
            each.set_xlabel(Words("learning rate", "学习率")[language])
            title = Words(f"held-out loss, {layers:g} layers", f"留出损失，{layers:g} 层")
            each.set_title(title[language], fontsize=11, loc="left")
    log_ticks(axes[0], depths)
    axes[0].set_ylim(bottom=0)
    axes[0].set_xlabel(Words("layers", "层数")[language])
    axes[0].set_title(COLUMNS["gradient_ratio"][language], fontsize=11, loc="left")
    drawing.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
    return drawing


_WARM_WORDS = {True: Words(", warm-up", "，有预热"), False: Words(", no warm-up", "，无预热")}


def verdict(result: Result) -> Judgement:
    """By the gradient at the start, the loss without warm-up, and how much of that warm-up takes away."""
    deepest = _numbers(result, "layers", "gradient_ratio")[-1]
    trained, rate = (_numbers(result, name, "loss")[-1] for name in ("layers", "rate"))
    ratios = {norm: result.values("gradient_ratio", norm=norm, layers=deepest, rate=None) for norm in NORMS}
    pre, post = ({seed: math.log2(value) for seed, value in ratios[norm].items()} for norm in NORMS)
    larger = paired_difference(pre, post)
    gaps = {warm: _gap(result, {"layers": trained, "rate": rate, "warmup": warm}) for warm in (True, False)}
    worse = paired_difference(gaps[False], dict.fromkeys(gaps[False], 0.0))
    cured = paired_difference(gaps[False], gaps[True])
    means = {norm: interval(ratios[norm].values()).mean for norm in NORMS}
    numbers = Words(
        f"With {deepest:g} layers the first layer's gradient is {means['pre']:.2g} times the last layer's "
        f"with pre-norm, {means['post']:.2g} times with post-norm. With {trained:g} layers, learning rate "
        f"{rate:g} and no warm-up, post-norm's loss is higher by {worse:.2f} nats a token; warm-up makes "
        f"this gap smaller by {cured:.2f} ({worse.count} seeds).",
        f"{deepest:g} 层时，第一层的梯度是最后一层的 {means['pre']:.2g} 倍（前归一化）和"
        f" {means['post']:.2g} 倍（后归一化）。{trained:g} 层、学习率 {rate:g}、没有预热时，"
        f"后归一化的损失每词元高 {worse:.2f} 奈特；预热使这个差距缩小 {cured:.2f}"
        f"（{worse.count} 个随机种子）。",
    )
    effects = [(larger, math.log2(LARGER)), (worse, 0.0), (cured, 0.0)]
    return Judgement(judge_effects(effects), numbers)


def _gap(result: Result, key: Mapping[str, Value]) -> dict[int, float]:
    """How much higher the loss is with post-norm, by seed."""
    pre, post = (result.values("loss", norm=norm, **key) for norm in NORMS)
    return {seed: post[seed] - pre[seed] for seed in pre.keys() & post.keys()}


def _numbers(result: Result, name: str, column: str) -> list[float]:
    """The values of a setting at which a column was measured, in ascending order."""
    values = {row[name] for row in result.rows if row.get(column) is not None}
    return sorted(value for value in values if isinstance(value, int | float))
