"""Confidence, relevance, gradient, fisher, leave-one-out: which ranks like which, and which one to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval
from manyheads.heads.importance import agreement, importance
from manyheads.studies.drawing import grouped_bars, legend_below, panels
from manyheads.studies.result import Result
from manyheads.studies.silencing import damages
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid
from manyheads.studies.subjects import FULL, NAMES, Subjects, judge_all, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "The ways to rank heads agree: confidence, relevance, gradient, Fisher information, leave-one-out.",
        "各种给头排序的方法结果一致：置信度、相关性、梯度、Fisher 信息、逐个去除。",
    ),
    explanation=Words(
        "How important is a head? Leave-one-out removes each head in turn and measures what changes: "
        "exact, and as many runs as there are heads. The others are shortcuts. Confidence is the largest "
        "weight of a head, averaged over tokens. Relevance follows the output back to the heads by "
        "layer-wise relevance propagation. Gradient is the slope of the loss if a head is turned down a "
        "little. Fisher information predicts from squared gradients how much the output changes without "
        "the head.\n\n"
        "Papers use one or the other and speak of the important heads as if it made no difference. Here "
        "each method ranks the same heads on the same text, the rankings are compared by rank "
        "correlation, and each is put to use: half of the heads go in its order, and the better ranking "
        "does less damage on other text.",
        "一个头有多重要？“逐个去除”依次去掉每个头，测量有什么改变：结果精确，但有多少个头就要运行多少次"
        "。其他方法都是捷径。置信度是一个头最大的权重，对词元取平均。相关性用逐层相关性传播把输出追溯到各"
        "个头。梯度是把一个头稍微调小时损失的变化率。Fisher 信息用梯度的平方预测去掉一个头后输出会改变多少"
        "。\n\n"
        "论文各用各的方法，谈起重要的头来却好像没有区别。这里让每种方法在同样的文本上给同样的头排序，用秩"
        "相关比较这些排序，再付诸使用：按各自的次序去掉一半的头，排得越好，在其他文本上的损害越小。",
    ),
    formulas=(
        r"\mathrm{gradient}_h=\left|\frac{\partial L}{\partial g_h}\right|,\quad "
        r"\mathrm{fisher}_h=\frac{1}{2}E\left(\frac{\partial \log p}{\partial g_h}\right)^2,\quad "
        r"\mathrm{confidence}_h=E\,\max_j\,p_{ij}",
    ),
    rule=Words(
        "For each of the four shortcuts and each model, Spearman's rank correlation with leave-one-out is "
        "taken, with its 95% interval over repetitions. Holds if all intervals lie above 0.5; does not "
        "hold if all lie below; holds in part if some lie above; else it cannot be told. The method to "
        "use is the one whose order does the least damage when half of the heads go (mean over models).",
        "对四种捷径和每个模型，计算它与逐个去除之间的 Spearman 秩相关及其各次重复的 95% 区间。若所有区间都"
        "高于 0.5，则成立；若都低于 0.5，则不成立；若其中一些高于 0.5，则部分成立；否则无法判断。推荐的方"
        "法是去掉一半的头时损害最小的方法（各模型平均）。",
    ),
    caption=Words(
        "Left: rank correlation of each method with leave-one-out (1: the same order). Right: damage when "
        "half of the heads go in the order of the method (0: none, 1: as if all were gone). Bars: 95% "
        "interval over samples of text (MiniLM) or training seeds (ours).",
        "左：各方法与逐个去除的秩相关（1：次序相同）。右：按各方法的次序去掉一半的头时的损害（0：无，1：等"
        "于全部去掉）。误差线：各文本样本（MiniLM）或各训练种子（自训模型）的 95% 区间。",
    ),
    sources=(
        "Voita, Talbot, Moiseev, Sennrich and Titov 2019, Analyzing multi-head self-attention.",
        "Michel, Levy and Neubig 2019, Are sixteen heads really better than one?",
        "Kwon and others 2022, A fast post-training pruning framework for transformers.",
    ),
)


@dataclass(frozen=True)
class Setup(Subjects):
    """The models and what they read."""

    sentences: int = 20
    steps: int = 200


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, sentences=4, windows=4, d_model=16, heads=2, layers=2, context=16, steps=2),
    "quick": Setup(),
    "full": Setup(**FULL),
}
METHODS: Mapping[str, Words] = {
    "confidence": Words("confidence", "置信度"),
    "relevance": Words("relevance", "相关性"),
    "gradient": Words("gradient", "梯度"),
    "fisher": Words("fisher", "Fisher"),
    "leave-one-out": Words("leave-\none-out", "逐个去除"),
}
EXACT = "leave-one-out"
LEAST = 0.5

COLUMNS: Mapping[str, Words] = {
    "spearman": Words("rank correlation", "秩相关"),
    "damage": Words("damage of removing half", "去掉一半的损害"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Setup, name: str, seed: int) -> list[Row]:
    looked = subject(setup, name, seed)
    tables = {method: importance(looked.model, looked.batches, method, seed=seed) for method in METHODS}
    rows: list[Row] = [
        {"first": method, "second": method, "spearman": 1.0, "damage": damages(looked, table, [0.5])[0]}
        for method, table in tables.items()
    ]
    return rows + [
        {"first": pair.first, "second": pair.second, "spearman": pair.spearman, "damage": None}
        for pair in agreement(tables)
    ]


def figure(result: Result, language: Language) -> Figure:
    """Agreement with leave-one-out, and the damage of using each method."""
    models = [str(name) for name in result.distinct("model")]
    drawing, (left, right) = panels(2)
    shortcuts = {method: words for method, words in METHODS.items() if method != EXACT}
    agreements = {
        NAMES[name][language]: [_agreement(result, name, method) for method in shortcuts] for name in models
    }
    grouped_bars(left, agreements, [words[language] for words in shortcuts.values()])
    left.axhline(LEAST, color="black", linestyle=":", linewidth=1)
    left.set_ylabel(Words("rank correlation with leave-one-out", "与逐个去除的秩相关")[language])
    costs = {NAMES[name][language]: [_damage(result, name, method) for method in METHODS] for name in models}
    grouped_bars(right, costs, [words[language] for words in METHODS.values()])
    right.set_ylim(bottom=0)
    right.set_ylabel(COLUMNS["damage"][language])
    legend_below(drawing, left)
    for each in (left, right):
        each.tick_params(axis="x", labelsize=8.5)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the rank correlation of every shortcut with leave-one-out, in every model."""
    models = [str(name) for name in result.distinct("model")]
    shortcuts = [method for method in METHODS if method != EXACT]
    agreements = {method: {name: _agreement(result, name, method) for name in models} for method in shortcuts}
    used = {method: fmean(_damage(result, name, method).mean for name in models) for method in METHODS}
    best = min(used, key=lambda method: used[method])
    english = "; ".join(
        f"{METHODS[method].en} {' and '.join(f'{each:.2f}' for each in by_model.values())}"
        for method, by_model in agreements.items()
    )
    chinese = "；".join(
        f"{METHODS[method].zh} {' 和 '.join(f'{each:.2f}' for each in by_model.values())}"
        for method, by_model in agreements.items()
    )
    numbers = Words(
        f"Rank correlation with leave-one-out ({', '.join(NAMES[name].en for name in models)}): {english}. "
        f"The least damage is done in the order of {best} ({used[best]:.2f} when half of the heads go).",
        f"与逐个去除的秩相关（{'、'.join(NAMES[name].zh for name in models)}）：{chinese}。"
        f"损害最小的是 {best} 的次序（去掉一半的头时为 {used[best]:.2f}）。",
    )
    return Judgement(judge_all((each for by in agreements.values() for each in by.values()), LEAST), numbers)


def _agreement(result: Result, model: str, method: str) -> Interval:
    return result.interval("spearman", model=model, first=method, second=EXACT)


def _damage(result: Result, model: str, method: str) -> Interval:
    return result.interval("damage", model=model, first=method, second=method)
