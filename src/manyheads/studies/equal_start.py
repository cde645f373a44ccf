"""Heads that start equal stay equal: what makes them differ is the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from manyheads.common.intervals import Interval, interval
from manyheads.heads.diversity import diversity, layers
from manyheads.studies.drawing import line, panels
from manyheads.studies.fitting import Fit, fit, new_model
from manyheads.studies.head_weights import make_equal, weight_spread
from manyheads.studies.language_models import FULL, TINY, LanguageModel, held_out
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Value, Words
from manyheads.training.task import Data, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads that start equal stay equal; what makes them differ is the random start.",
        "初始相同的头会一直相同；使它们产生差异的是随机的初始值。",
    ),
    explanation=Words(
        "All heads of a layer have the same formula, read the same tokens and serve the same loss. If "
        "their weights are equal, so are their outputs and their gradients, and every training step "
        "changes them equally. Nothing in the formula says that one should look at the previous word and "
        "another at the subject. Only different weights at the start lead to different gradients.\n\n"
        "How different must the start be? Here all heads get the weights of the first, without noise and "
        "with a little of it. Processors round, and the order of a sum decides how: even heads that start "
        "exactly equal can drift apart, if training enlarges such small differences.",
        "同一层的各个头用同样的公式，读同样的词元，服务于同一个损失。如果权重相同，输出和梯度也相同，每一"
        "步训练对它们的改变也就相同。公式里没有规定一个头看前一个词、另一个头看主语。只有初始权重不同，梯"
        "度才会不同。\n\n"
        "初始值要相差多少才够？这里让所有头都使用第一个头的权重，不加噪声，或加一点点噪声。处理器会舍入，"
        "舍入结果取决于求和的次序：如果训练会放大微小的差别，那么即使初始完全相同的头也可能渐渐分开。",
    ),
    formulas=(r"W_1=W_2\ \Rightarrow\ \frac{\partial L}{\partial W_1}=\frac{\partial L}{\partial W_2}",),
    rule=Words(
        "Language models are trained from four starts. The distance between two heads is the "
        "Jensen-Shannon distance of their attention at the end. Heads stay equal if those that started "
        "equal are less than 1% as far apart as those that started random (upper end of the 95% interval "
        "of the ratio). Holds if they do and those that started with the most noise end farther apart; "
        "holds in part if they do and no effect of the noise can be shown; does not hold if they do not "
        "(lower end above 1%); else it cannot be told.",
        "从四种初始值训练语言模型。两个头的距离是训练结束时它们注意力的 Jensen-Shannon 距离。若初始相同的"
        "头之间的距离不到随机初始的 1%（比值 95% 区间的上端），就算保持相同。保持相同，且噪声最大的初始值"
        "使头分得更开，则成立；保持相同，而看不出噪声的作用，则部分成立；没有保持相同（区间下端高于 1%），"
        "则不成立；否则无法判断。",
    ),
    caption=Words(
        "Left: how far the weights of a layer's heads are from their mean, relative to their size "
        "(logarithmic; less than 1e-8 is drawn at 1e-8). Right: Jensen-Shannon distance between their "
        "attention: 0 the same, 1 nothing in common. Bars: 95% interval over seeds.",
        "左：同一层各头的权重与其平均值的距离（相对于权重大小；对数坐标，小于 1e-8 的画在 1e-8 处）。右："
        "各头注意力之间的 Jensen-Shannon 距离：0 为相同，1 为毫无共同之处。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Goodfellow, Bengio and Courville 2016, Deep learning, section 8.4 (symmetry at the start).",
        "Lin 1991, Divergence measures based on the Shannon entropy.",
    ),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The noise, the language model, and after how many parts of the training the heads are compared."""

    seeds: int = 5
    noise: tuple[float, ...] = (1e-6, 1e-3)
    layers: int = 1
    steps: int = 200
    comparisons: int = 4


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY, comparisons=1),
    "quick": Setup(),
    "full": Setup(**FULL, comparisons=10),
}
EQUAL, RANDOM = "equal", "random"
STAY = 0.01
FLOOR = 1e-8

COLUMNS: Mapping[str, Words] = {
    "spread": Words("spread of the weights", "权重的分散程度"),
    "distance": Words("distance between heads", "头之间的距离"),
    "loss": Words("held-out loss", "留出损失"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every start and seed."""
    starts = {EQUAL: 0.0} | {f"{EQUAL} + {noise:g}": noise for noise in setup.noise} | {RANDOM: None}
    return [
        Part({"start": start, "seed": seed}, partial(_measure, setup, noise, seed))
        for seed in range(setup.seeds)
        for start, noise in starts.items()
    ]


def _measure(setup: Setup, noise: float | None, seed: int) -> list[Row]:
    task, data = setup.open()
    model = new_model(task, seed)
    if noise is not None:
        make_equal(model, noise, seed)
    rows = [_compare(task, data, model, 0)]
    steps = {round(setup.steps * (n + 1) / setup.comparisons) for n in range(setup.comparisons)}

    def after_step(step: int, model: nn.Module) -> None:
        if step + 1 in steps:
            rows.append(_compare(task, data, model, step + 1))
            model.train()

    fit(task, data, model, setup.recipe, seed, after_step=after_step)
    return rows


def _compare(task: Task, data: Data, model: nn.Module, step: int) -> Row:
    table = diversity(model, [task.inputs(held_out(task, data))], measures=["attention"])
    distances = [layer.mean["js"] for layer in layers(table)]
    return {
        "step": step,
        "spread": weight_spread(model),
        "distance": sum(distances) / len(distances),
        "loss": Fit(task, data, model).metrics(64)["loss"],
    }


def figure(result: Result, language: Language) -> Figure:
    """Weights and attention by the step of the training."""
    drawing, (left, right) = panels(2)
    steps = [int(step) for step in result.distinct("step") if isinstance(step, int)]
    for number, start in enumerate(result.distinct("start")):
        label = _label(str(start), language)
        for axes, column in ((left, "spread"), (right, "distance")):
            points = {step: result.interval(column, start=start, step=step) for step in steps}
            if axes is left:
                points = {step: _raised(each) for step, each in points.items()}
            line(axes, points, label, number)
    left.set_yscale("log")
    left.set_ylabel(COLUMNS["spread"][language])
    right.set_ylabel(COLUMNS["distance"][language])
    right.set_ylim(bottom=0)
    right.legend(frameon=False, title=Words("start", "初始值")[language], loc="center right")
    for axes in (left, right):
        axes.set_xlabel(Words("step", "训练步数")[language])
    return drawing


def _raised(spread: Interval) -> Interval:
    """What a logarithmic axis can show: no zero, no interval."""
    mean = max(spread.mean, FLOOR)
    return Interval(mean, mean, mean, spread.count)


def _label(start: str, language: Language) -> str:
    if language == "en":
        return start
    return start.replace(EQUAL, "相同").replace(RANDOM, "随机").replace(" + ", "，噪声 ")


def verdict(result: Result) -> Judgement:
    """By the distance of heads that started equal, relative to those that started random."""
    last = max(int(step) for step in result.distinct("step") if isinstance(step, int))
    equal = result.values("distance", start=EQUAL, step=last)
    random = result.values("distance", start=RANDOM, step=last)
    ratio = interval(equal[seed] / random[seed] for seed in sorted(equal.keys() & random.keys()))
    noise: Value = [start for start in result.distinct("start") if str(start).startswith(f"{EQUAL} +")][-1]
    farther = result.difference("distance", {"start": noise, "step": last}, {"start": EQUAL, "step": last})
    costs = result.difference("loss", {"start": EQUAL, "step": last}, {"start": RANDOM, "step": last})
    numbers = Words(
        f"After {last} steps, heads that started equal are {ratio:.4f} times as far apart as heads that "
        f"started random. Those that started {noise} are farther apart than equal ones by {farther:.4f}. "
        f"Starting equal costs {costs:.3f} nats a token ({ratio.count} seeds).",
        f"{last} 步之后，初始相同的头之间的距离是随机初始的 {ratio:.4f} 倍。"
        f"初始为“{_label(str(noise), 'zh')}”的头比初始相同的头多分开 {farther:.4f}。"
        f"初始相同使每词元的损失增加 {costs:.3f} 奈特（{ratio.count} 个随机种子）。",
    )
    if ratio.low >= STAY:
        return Judgement("does not hold", numbers)
    if not ratio.high < STAY:
        return Judgement("cannot be told", numbers)
    return Judgement("holds" if farther.low > 0 else "holds in part", numbers)
