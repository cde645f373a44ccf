"""Several heads beat one at equal parameters, and more is not always better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval, paired_difference
from manyheads.studies.by_heads import draw_by_heads, numbers_of_heads
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
        "Several heads beat one head at the same number of parameters, but more is not always better.",
        "参数量相同时，多个头胜过一个头，但头并非越多越好。",
    ),
    explanation=Words(
        "One head can look at one thing at a time: its weights sum to one, so that a token that attends "
        "to its subject cannot attend to the token before it as well. With several heads a layer looks at "
        "several places at once, each in a space of its own.\n\n"
        "The price is width: with h heads each is d/h wide, which limits what it can compare. So there is "
        "a best number, and beyond it quality falls again. The paper that introduced multi-head attention "
        "measured 24.9 BLEU with one head, 25.8 with 8 and 16, and 25.4 with 32.",
        "一个头一次只能看一处：它的权重之和为一，因此一个词若注意主语，就不能同时注意前一个词。有多个头时"
        "，一层可以同时看多个位置，每个头都在自己的空间里比较。\n\n"
        "代价是宽度：h 个头时每个头的宽度只有 d/h，能比较的内容随之减少。所以头数有一个最佳值，超过之后质"
        "量又会下降。提出多头注意力的论文测得：一个头 24.9 BLEU，8 和 16 个头 25.8，32 个头 25.4。",
    ),
    formulas=(
        r"o_i=\mathrm{softmax}\left(\frac{Q_i K_i^{T}}{\sqrt{d/h}}\right)V_i,\qquad "
        r"Q_i=x\,W_i^Q,\quad W_i^Q\in R^{d\times d/h}",
    ),
    rule=Words(
        "Language models of the same size are trained with 1, 2, 4 ... heads, and their held-out loss is "
        "compared by seed. Two statements, by 95% intervals that are corrected for choosing the best: the "
        "best number of heads has a lower loss than one head, and than the greatest number. Holds if both "
        "hold, in part if one does; does not hold if no number gains on one head; else it cannot be told.",
        "训练同样大小、头数为 1、2、4……的语言模型，按随机种子配对比较它们在留出数据上的损失。两个陈述，"
        "按 95% 区间（已按挑选最佳作校正）判断：最佳头数的损失低于一个头，也低于最大的头数。两者都成立则成"
        "立，其一成立则部分成立；若没有任何头数比一个头好，则不成立；否则无法判断。",
    ),
    caption=Words(
        "Held-out loss (nats a token, lower is better) by the number of heads; all models have the same "
        "number of parameters. Bars: 95% interval over seeds.",
        "各头数的留出损失（每个词元的奈特数，越低越好）；所有模型参数量相同。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Vaswani and others 2017, Attention is all you need, table 3 (A).",
        "Michel, Levy and Neubig 2019, Are sixteen heads really better than one?",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The language model and how long it is trained."""

    heads: tuple[int, ...] = (1, 2, 4, 8)
    d_model: int = 64
    layers: int = 2
    context: int = 64
    steps: int = 250
    batch_tokens: int = 1024


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, heads=(1, 2), d_model=16, layers=1, context=16, steps=3, batch_tokens=128),
    "quick": Setup(),
    "full": Setup(
        seeds=5, heads=(1, 2, 4, 8, 16, 32), d_model=128, layers=4, context=128, steps=300, batch_tokens=1024
    ),
}

COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "parameters": Words("parameters", "参数量"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every number of heads and seed."""
    return grid(setup, _measure, heads=setup.heads)


def _measure(setup: Setup, heads: int, seed: int) -> Row:
    task, data = opened(setup.data, setup.context)
    task.d_model, task.layers, task.heads = setup.d_model, setup.layers, heads
    model = new_model(task, seed)
    recipe = Recipe(steps=setup.steps, batch_tokens=setup.batch_tokens)
    return {
        "loss": fit(task, data, model, recipe, seed).metrics()["loss"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def figure(result: Result, language: Language) -> Figure:
    """Loss by the number of heads."""
    return draw_by_heads(result, "loss", COLUMNS["loss"], language)


def verdict(result: Result) -> Judgement:
    """By the gain of the best number of heads over one, and over the greatest number."""
    tried = numbers_of_heads(result)
    most, comparisons = max(tried), len(tried) - 1
    gains = {heads: _gain(result, 1, heads, comparisons) for heads in tried if heads != 1}
    best = max(gains, key=lambda h: gains[h].mean)
    over_one, over_most = gains[best], _gain(result, most, best, comparisons)
    numbers = Words(
        f"{best} heads are the best; they gain {over_one:.3f} nats a token over one head and "
        f"{over_most:.3f} over {most} ({over_one.count} seeds).",
        f"{best} 个头最好：比一个头每词元低 {over_one:.3f} 奈特，比 {most} 个头低 {over_most:.3f}"
        f"（{over_one.count} 个随机种子）。",
    )
    if over_one.mean <= 0:
        return Judgement("does not hold", numbers)
    return Judgement(judge_effects([(over_one, 0.0), (over_most, 0.0)]), numbers)


def _gain(result: Result, heads: int, better: int, comparisons: int) -> Interval:
    """How much lower the loss of the better one is; the interval is wide enough for all comparisons."""
    losses, lower = result.values("loss", heads=heads), result.values("loss", heads=better)
    return paired_difference(losses, lower, level=1 - 0.05 / comparisons)
